"""The depth stream against a plain list that does what the K3 report says, layer by layer."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from perilune.nn import BlockAttnRes, DepthStream, initialize_
from perilune.nn.hooks import untouched
from perilune.nn.norm import RMSNorm

LAYERS, D = 5, 6


def mix(mixer, sources):
    """A softmax over sources of < w * gamma, source / rms >, applied to the raw sources."""
    scores = [
        (mixer.query * mixer.norm.weight * s / (s.square().mean(-1, keepdim=True) + 1e-5).sqrt()).sum(-1)
        for s in sources
    ]
    weights = torch.stack(scores).softmax(0)
    return sum(a[..., None] * s for a, s in zip(weights, sources))


def plain(embedding, mixers, f, size):
    """Blocks of `size` layers, "full" for every sublayer its own, None for x + f(x).  Returns what each sublayer read,
    the numbers of sources, and the stream's end."""
    bank, live, reads, counts = [], embedding, [], []
    for layer in range(LAYERS):
        for sublayer in range(2):
            n = 2 * layer + sublayer
            sources = [*bank, live]
            h = live if size is None else mix(mixers[n], sources)
            reads.append(h)
            counts.append(len(sources))
            if size == "full" or (size is not None and layer % size == 0 and sublayer == 0):
                bank, live = sources, None
            live = f(n, h) if live is None else live + f(n, h)
    counts.append(len(bank) + 1)
    return reads, counts, live if size is None else mix(mixers[-1], [*bank, live])


def through(embedding, mixers, f, size):
    """The same through DepthStream."""
    period = {"full": 1, None: None}.get(size) if size in ("full", None) else 2 * size
    stream, reads, counts = DepthStream(embedding, period), [], []
    for n in range(2 * LAYERS):
        counts.append(len(stream.bank) + 1)
        reads.append(stream.read(None if size is None else mixers[n]))
        stream.add(f(n, reads[-1]))
    counts.append(len(stream.bank) + 1)
    return reads, counts, stream.mixed(None if size is None else mixers[-1])


@pytest.fixture
def parts():
    mixers = torch.nn.ModuleList(BlockAttnRes(D) for _ in range(2 * LAYERS + 1)).double()
    for mixer in mixers:
        torch.nn.init.normal_(mixer.query)
        torch.nn.init.normal_(mixer.norm.weight, 1.0, 0.2)
    matrices = torch.randn(2 * LAYERS, D, D, dtype=torch.float64, requires_grad=True)
    embedding = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    return embedding, mixers, matrices


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, "full", None])
def test_stream_is_the_plain_list_with_all_gradients(parts, size):
    embedding, mixers, matrices = parts

    def f(n, h):
        return torch.tanh(h @ matrices[n])

    expected, got = plain(embedding, mixers, f, size), through(embedding, mixers, f, size)
    assert got[1] == expected[1]
    torch.testing.assert_close(torch.stack([*got[0], got[2]]), torch.stack([*expected[0], expected[2]]))
    inputs = [embedding, matrices] + ([] if size is None else list(mixers.parameters()))
    weights = torch.randn_like(embedding)
    grads = [torch.autograd.grad((end * weights).sum(), inputs) for *_, end in (got, expected)]
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert grads[0][0].abs().min() > 0  # the embedding is reached


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (2, [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4]),  # the last block has one layer only
        (5, [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]),
        ("full", list(range(1, 12))),
        (None, [1] * 11),
    ],
)
def test_sources_of_every_sublayer(parts, size, counts):
    embedding, mixers, _ = parts
    assert through(embedding, mixers, lambda n, h: h, size)[1] == counts


def test_sources_of_the_released_schedule():
    """93 layers in blocks of 12: the numbers of the K3 report's figure, 1003 sources over 187 mixers."""
    mixer, stream, counts = BlockAttnRes(1), DepthStream(torch.ones(1), 24), []
    for _ in range(2 * 93):
        counts.append(len(stream.bank) + 1)
        stream.add(stream.read(mixer))
    counts.append(len(stream.bank) + 1)
    picked = {"attn 0": 0, "mlp 0": 1, "attn 1": 2, "attn 12": 24, "mlp 12": 25, "attn 84": 168, "mlp 92": 185}
    assert {name: counts[n] for name, n in picked.items()} == {
        "attn 0": 1, "mlp 0": 2, "attn 1": 2, "attn 12": 2, "mlp 12": 3, "attn 84": 8, "mlp 92": 9,
    }  # fmt: skip
    assert (counts[-1], sum(counts)) == (9, 1003)


def test_a_query_of_zeros_takes_the_mean():
    mixer = BlockAttnRes(4)
    initialize_(mixer)
    assert mixer.query.eq(0).all()
    assert mixer([torch.full((3, 4), value) for value in (1.0, 2.0, 6.0)]).equal(torch.full((3, 4), 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_sublayer_reads_the_embedding_itself(dtype):
    """Whatever the first mixer has learned; its query gets a gradient of exactly zero, not none."""
    mixer = BlockAttnRes(D).to(dtype)
    torch.nn.init.normal_(mixer.query)
    embedding = torch.randn(2, D, dtype=dtype, requires_grad=True)
    h = DepthStream(embedding, 4).read(mixer)
    assert h.equal(embedding)
    h.square().sum().backward()
    assert mixer.query.grad.eq(0).all()
    assert embedding.grad.equal(2 * embedding)


def test_a_larger_source_scores_the_same():
    mixer = BlockAttnRes(D, eps=0.0).double()
    torch.nn.init.normal_(mixer.query)
    a, b = torch.randn(2, 7, D, dtype=torch.float64).unbind()
    base, scaled = mixer([a, b]), mixer([a, 5 * b])
    weight = ((base - a) / (b - a)).mean(-1, keepdim=True)
    torch.testing.assert_close(scaled, (1 - weight) * a + weight * 5 * b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [2, "full"])
def test_checkpointed_sublayers_have_the_same_gradients(parts, size):
    embedding, mixers, matrices = parts

    def sublayer(n, h):
        return torch.tanh(h @ matrices[n])

    def remade(n, h):
        return checkpoint(sublayer, n, h, use_reentrant=False)

    inputs = [embedding, matrices, *mixers.parameters()]
    grads = [
        torch.autograd.grad(through(embedding, mixers, f, size)[2].square().sum(), inputs) for f in (sublayer, remade)
    ]
    assert all(a.equal(b) for a, b in zip(*grads))


def test_the_stream_keeps_its_dtype_when_sublayers_are_coarser():
    stream = DepthStream(torch.randn(2, D), 2)
    mixer = BlockAttnRes(D)
    for _ in range(4):
        stream.add(stream.read(mixer).bfloat16())
    assert all(source.dtype == torch.float32 for source in [*stream.bank, stream.live])
    assert stream.mixed(mixer).dtype == torch.float32


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("start", ["mean", "residual"])
def test_a_norm_behind_a_mixer_is_that_norm_of_the_mixture(start, at_once, monkeypatch):
    if at_once:  # as on a GPU
        monkeypatch.setattr("perilune.nn.attn_res._in_one_step", lambda mixer, norm: untouched(norm, RMSNorm))
    mixer, norm = BlockAttnRes(D, start=start).double(), RMSNorm(D, 1e-3).double()
    torch.nn.init.normal_(mixer.query)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    sources = [torch.randn(4, D, dtype=torch.float64) for _ in range(3)]
    h = mix(mixer, sources) * (1 if start == "mean" else 3)
    expected = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-3) * norm.weight
    torch.testing.assert_close(mixer(sources, norm), expected)
    assert mixer(sources, norm, torch.float32).dtype == torch.float32
    seen = []
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    torch.testing.assert_close(mixer(sources, norm), expected)
    torch.testing.assert_close(seen, [h])
    torch.testing.assert_close(DepthStream(sources[0], None).read(None, norm), norm(sources[0]))
