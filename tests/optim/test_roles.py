import pytest
import torch
from torch import nn

from perilune.core.errors import ConfigError, ShapeError
from perilune.optim import Blocks, Role, Roles

H, D = 4, 16


class Layer(nn.Module):
    """The kinds of tensor that a K3 layer has, small."""

    def __init__(self):
        super().__init__()
        for name in ("embed", "lm_head"):
            setattr(self, name, nn.Linear(D, 40, bias=False))
        self.q_proj = nn.Linear(D, H * 8, bias=False)
        self.q_b_proj = nn.Linear(D, H * 12, bias=False)
        self.kv_b_proj = nn.Linear(D, H * (6 + 5), bias=False)
        self.b_proj = nn.Linear(D, H, bias=False)
        self.o_proj = nn.Linear(H * 8, D, bias=False)
        self.q_conv1d = nn.Conv1d(H * 8, H * 8, 4, groups=H * 8, bias=False)
        self.norm = nn.RMSNorm(D)
        self.gate_up = nn.Linear(D, 2 * 24, bias=False)
        self.A_log = nn.Parameter(torch.zeros(H))
        self.dt_bias = nn.Parameter(torch.zeros(H, 8))
        self.w_gate = nn.Parameter(torch.randn(6, 10, D))
        self.w_down = nn.Parameter(torch.randn(6, D, 10))
        self.register_buffer("e_score_correction_bias", torch.zeros(6))


MUON = {
    "q_proj.weight": Blocks(repeat=H),
    "q_b_proj.weight": Blocks(repeat=H),
    "kv_b_proj.weight": Blocks((6, 5), repeat=H),
    "gate_up.weight": Blocks((24, 24)),
    "?_proj.weight": Blocks(),
    "w_*": Blocks(),
}


def roles_of(layer):
    return Roles.match(layer, MUON, decay=("embed.*", "lm_head.*"))


def test_every_parameter_is_treated_as_its_name_says():
    rows = {name: tuple(rest) for name, _, *rest in roles_of(Layer()).table()}
    assert rows == {
        "A_log": ("adamw", "", ""),
        "dt_bias": ("adamw", "", ""),
        "w_gate": ("muon", "6 x [10, 16]", "decay"),
        "w_down": ("muon", "6 x [16, 10]", "decay"),
        "embed.weight": ("adamw", "", "decay"),
        "lm_head.weight": ("adamw", "", "decay"),
        "q_proj.weight": ("muon", "4 x [8, 16]", "decay"),
        "q_b_proj.weight": ("muon", "4 x [12, 16]", "decay"),
        "kv_b_proj.weight": ("muon", "4 x [6, 16] + 4 x [5, 16]", "decay"),
        "b_proj.weight": ("muon", "[4, 16]", "decay"),  # one row a head: never split
        "o_proj.weight": ("muon", "[16, 32]", "decay"),
        "q_conv1d.weight": ("adamw", "", ""),
        "norm.weight": ("adamw", "", ""),
        "gate_up.weight": ("muon", "[24, 16] + [24, 16]", "decay"),
    }


def test_the_table_shows_shapes_and_scaled_rates():
    role = Role(torch.zeros(8, 6), "muon", Blocks(repeat=2), weight_decay=False, lr_scale=0.5)
    assert Roles(w=role).table() == [("w", "[8, 6]", "muon, lr x 0.5", "2 x [4, 6]", "")]


W = torch.arange(2 * 12 * 5).view(2, 12, 5)


@pytest.mark.parametrize(
    ("blocks", "rows"),
    [
        (Blocks(), [[range(12)]]),
        (Blocks(repeat=3), [[range(4), range(4, 8), range(8, 12)]]),
        (Blocks((4, 2), repeat=2), [[range(4), range(6, 10)], [range(4, 6), range(10, 12)]]),
        (Blocks((7, 5)), [[range(7)], [range(7, 12)]]),
        (Blocks(interleave=2), [[range(0, 12, 2), range(1, 12, 2)]]),
        (Blocks((2, 1), repeat=2, interleave=2),
         [[(0, 2), (1, 3), (6, 8), (7, 9)], [(4,), (5,), (10,), (11,)]]),
    ],
)  # fmt: skip
def test_blocks_are_the_rows_that_belong_together(blocks, rows):
    """`rows` lists, for each piece, the row numbers of its matrices."""
    for tensor, cut in ((W, blocks), (W.mT.contiguous(), Blocks(blocks.sizes, blocks.repeat, blocks.interleave, True))):
        pieces = cut.of(tensor)
        assert len(pieces) == len(rows)
        for piece, matrices in zip(pieces, rows):
            expected = torch.stack([W[:, list(numbers)] for numbers in matrices], dim=1)
            assert piece.flatten(1, 2).equal(expected)
            assert piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()  # a view


@pytest.mark.parametrize("blocks", [Blocks(repeat=5), Blocks((6, 5)), Blocks((3, 2), repeat=2), Blocks(repeat=0)])
def test_cuts_that_do_not_fit_are_refused(blocks):
    with pytest.raises(ShapeError, match="blocks: expected cuts that add up to 12 rows"):
        Role(torch.zeros(12, 5), "muon", blocks)


def test_mistakes_are_named():
    with pytest.raises(ShapeError, match="expected a matrix"):
        Role(torch.zeros(12), "muon")
    with pytest.raises(ConfigError, match="kind: expected 'muon' or 'adamw', got 'sgd'"):
        Role(torch.zeros(12), "sgd")
    with pytest.raises(ConfigError, match=r"qproj\*: expected to match a parameter"):
        Roles.match(Layer(), {"qproj*": Blocks()})


def test_check_wants_every_trainable_parameter_once_and_nothing_else():
    layer = Layer()
    layer.norm.weight.requires_grad_(False)
    roles = roles_of(layer)
    assert "norm.weight" not in roles
    roles.check(layer)

    with pytest.raises(ConfigError, match=r"A_log: expected a role, got none \(1 missing\)"):
        Roles({k: v for k, v in roles.items() if k != "A_log"}).check(layer)
    with pytest.raises(ConfigError, match="twice: expected one role for each parameter, got A_log too"):
        Roles(roles | {"twice": roles["A_log"]}).check(layer)
    with pytest.raises(ConfigError, match="bias: expected a parameter, got the buffer e_score_correction_bias"):
        Roles(roles | {"bias": Role(layer.e_score_correction_bias, "adamw")}).check(layer)
    with pytest.raises(ConfigError, match="norm: expected a trainable parameter of the model"):
        Roles(roles | {"norm": Role(layer.norm.weight, "adamw")}).check(layer)


def test_a_tied_parameter_has_one_role():
    layer = Layer()
    layer.lm_head.weight = layer.embed.weight
    roles = Roles.match(layer, MUON, decay=("embed.*",))
    roles.check(layer)
    assert "lm_head.weight" not in roles
