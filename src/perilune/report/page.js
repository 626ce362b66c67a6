"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  const swaps = JSON.parse(document.getElementById("swaps").textContent); // light colour: dark colour
  const charts = [...document.querySelectorAll(".chart")];

  function figureOf(chart) {
    const chosen = chart.querySelector('.choices [aria-pressed="true"]');
    const texts = [...chart.querySelectorAll("script")];
    let text = texts[chosen ? Number(chosen.dataset.figure) : 0].textContent;
    if (dark.matches) text = text.replace(/"#[0-9a-f]{6}"/g, (c) => `"${swaps[c.slice(1, -1)] ?? c.slice(1, -1)}"`);
    const figure = JSON.parse(text);
    const hidden = new Set([...chart.querySelectorAll('.keys [aria-pressed="false"]')].map((key) => key.dataset.group));
    for (const trace of figure.data) if (hidden.has(trace.legendgroup)) trace.visible = false;
    if (coarse) figure.layout.dragmode = false; // a finger on a chart scrolls the page
    return figure;
  }

  function draw(chart) {
    const { data, layout } = figureOf(chart);
    const plot = chart.querySelector(".plot");
    if (plot.clientWidth > 900) {
      const names = (layout.annotations ?? []).filter((label) => label.name);
      for (const label of names) label.yshift = 16 * Number(label.name.slice(4)); // "row 1"
      if (names.length) layout.margin.t = 30 + Math.max(...names.map((label) => label.yshift));
    }
    plot.style.height = `${layout.height}px`;
    Plotly.react(plot, data, layout, { responsive: true, displayModeBar: false });
  }

  for (const chart of charts) {
    chart.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      if (button.dataset.group !== undefined) {
        button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") === "false");
      } else {
        for (const other of chart.querySelectorAll(".choices button")) other.setAttribute("aria-pressed", other === button);
      }
      draw(chart);
    });
  }
  const drawAll = () => charts.forEach(draw);
  dark.addEventListener("change", drawAll);
  drawAll();
})();
