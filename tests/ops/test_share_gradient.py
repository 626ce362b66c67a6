"""One sum for a source's gradient, whoever reads it and however the backward pass is asked for."""

import pytest
import torch
from torch import Tensor

from perilune.ops import attn_res, share_gradient

D, R = 12, 5


def leaves(n: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(R, D, dtype=torch.float64, requires_grad=True) for _ in range(n)]


def stack(x: Tensor, others: list[Tensor], queries: Tensor, share: bool, backend: str = "chunked") -> Tensor:
    """Six mixers, each of which reads x and what the last one left; x is read by itself too."""
    bank = [share_gradient(y) if share else y for y in (x, *others)]
    live = bank[0] * 2
    for query in queries:
        live = live + attn_res(query, [*bank, live], torch.ones(D).double(), backend=backend)
    return live


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_the_sum_is_autograds(backend: str) -> None:
    x, a, b = leaves(3)
    queries = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(R, D, dtype=torch.float64)
    wanted = [x, a, b, queries]
    expected = torch.autograd.grad(stack(x, [a, b], queries, False), wanted, dout)
    got = torch.autograd.grad(stack(x, [a, b], queries, True, backend), wanted, dout)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_one_tensor_collects_them_all() -> None:
    """No mixer hands autograd a gradient of a shared source; what arrives at the source is the sum itself."""
    (x,) = leaves(1)
    queries = torch.randn(6, D, dtype=torch.float64)
    shared, arrived = share_gradient(x), []
    shared.grad_fn.register_prehook(lambda grads: arrived.append(grads[0]))
    out = sum(attn_res(q, [shared, 2 * x], torch.ones(D).double()) for q in queries)
    out.sum().backward()
    assert arrived == [None]
    expected = torch.autograd.grad(sum(attn_res(q, [x, 2 * x], torch.ones(D).double()) for q in queries).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


def test_a_second_pass_starts_from_nothing() -> None:
    x, a = leaves(2)
    queries = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    out = stack(x, [a], queries, True)
    once = torch.autograd.grad(out.sum(), [x, a], retain_graph=True)
    torch.autograd.grad(out.sum(), queries, retain_graph=True)  # never comes to the nodes that hold the sums
    again = torch.autograd.grad(out.sum(), [x, a], retain_graph=True)
    assert all(torch.equal(p, q) for p, q in zip(once, again))
    out.sum().backward()
    assert torch.equal(x.grad, once[0])
    out = stack(x, [a], queries, True)
    out.sum().backward()
    assert torch.equal(x.grad, 2 * once[0])


def test_micro_batches_in_turn_do_not_mix() -> None:
    """Graphs of two batches live at once, as in a pipeline."""
    x, a, u, v = leaves(4)
    queries = torch.randn(3, D, dtype=torch.float64)
    first, second = stack(x, [a], queries, True), stack(u, [v], queries, True)
    second.sum().backward()
    first.sum().backward()
    for got, batch in ((x.grad, (x, a)), (u.grad, (u, v))):
        (expected,) = torch.autograd.grad(stack(batch[0], [batch[1]], queries, False).sum(), batch[0])
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_without_autograd_nothing_happens() -> None:
    (x,) = leaves(1)
    with torch.no_grad():
        assert share_gradient(x) is x
    constant = x.detach()
    assert share_gradient(constant) is constant


def test_what_is_shared_already_stays_as_it_is():
    """So that a stream that goes on in every layer has one sum a source, and not one a layer."""
    x = torch.randn(3, 4, requires_grad=True)
    shared = share_gradient(x)
    assert share_gradient(shared) is shared
    assert shared is not x
