"""The options of public functions: signatures show those that a call takes, the page of options defines each one."""

import importlib
import inspect
import pydoc
import re

import numpy as np
import pytest
from command_line import ROOT

import cupy_sdpa
from cupy_sdpa import fp8, zoo

rng = np.random.default_rng(0)


def normal(*shape):
    return np.asfortranarray(rng.standard_normal(shape).astype(np.float32))


X, PACKED, POOL = normal(8, 2, 4, 2), normal(8, 2, 8), normal(8, 2, 2, 4)
LENGTHS, STARTS, TABLE = np.array([4, 3], np.int32), np.array([0, 4, 8], np.int32), np.array([[0, 0], [1, 2]], np.int32)
OF_PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 4, "max_seqlen_kv": 4}
PAGES, DROPOUT = {"page_table": TABLE, "seq_lens_kv": LENGTHS}, {"dropout_p": 0.5, "seed": 1}
ALIBI = {"score_mod": zoo.alibi, "tensors": {"slopes": np.ones(2, np.float32)}}
#: A valid value of every option, with the options that it needs.
VALID = {
    "scale": {"scale": np.float32(0.3)}, "causal": {"causal": "bottom_right"}, "window": {"window": (1, 1)},
    "mask": {"mask": np.ones((4, 4, 1, 1), bool)}, "bias": {"bias": normal(4, 4, 1, 1)},
    "seq_lens_q": {"seq_lens_q": LENGTHS}, "seq_lens_kv": {"seq_lens_kv": LENGTHS}, "page_table": PAGES,
    **dict.fromkeys(OF_PACKED, OF_PACKED), "alibi_slopes": {"alibi_slopes": np.ones(2, np.float32)}, "softcap": {"softcap": 2.0},
    "score_mod": ALIBI, "tensors": ALIBI, "mask_mod": {"mask_mod": zoo.causal},
    "block_mask": {"block_mask": cupy_sdpa.block_mask(zoo.causal, 4, 4)}, "sinks": {"sinks": np.ones(2, np.float32)},
    "dropout_p": DROPOUT, "seed": DROPOUT, "offset": DROPOUT | {"offset": 4},
    "dropout_mask": {"dropout_p": 0.5, "dropout_mask": np.ones((4, 4, 2, 2), bool)}, "num_splits": PAGES | {"num_splits": 2},
    "batch_invariant": {"batch_invariant": True, "deterministic": True},
    "max_workspace": {"max_workspace": 1 << 30}, "bucket": {"bucket": 8}, "layout": {"layout": "bshd"},
    "compute_dtype": {"compute_dtype": "float16"}, "engine": {"engine": "numpy"},
}  # fmt: skip


def arrays(options):
    """q, k and v for options."""
    if "cu_seqlens_q" in options:
        return PACKED, PACKED, PACKED
    if "page_table" in options:
        return X, POOL, POOL
    return (X.T.copy(order="C"),) * 3 if "layout" in options else (X, X, X)


def backward(x, options):
    out, stats = cupy_sdpa.attention(*x, return_stats=True, **options)
    return cupy_sdpa.attention_backward(out, *x, out, stats, **options)


def after_a_prefix(x, options):
    q = x[0] if x[0].ndim == 4 else X
    pool = POOL.T.copy(order="C") if "layout" in options else POOL
    table = TABLE.T if "layout" in options else TABLE
    return cupy_sdpa.shared_prefix_attention(q, pool, pool, 2, **{"page_table": table, "seq_lens_kv": LENGTHS} | options)


#: The functions that take the options of calls.
FUNCTIONS = {
    "attention": lambda x, options: cupy_sdpa.attention(*x, **options),
    "attention_backward": backward,
    "attention_vjp": lambda x, options: cupy_sdpa.attention_vjp(*x, **options),
    "attention_jvp": lambda x, options: cupy_sdpa.attention_jvp(x[0], x[1], x[2], x[0], **options),
    "explain": lambda x, options: cupy_sdpa.explain(*x, **options),
    "prepare": lambda x, options: cupy_sdpa.prepare(*x, **options),
    "problem": lambda x, options: cupy_sdpa.problem(*x, **options),
    "shared_prefix_attention": after_a_prefix,
    "weight_sums": lambda x, options: cupy_sdpa.weight_sums(*x[:2], **options),
    "jvp_problems": lambda x, options: cupy_sdpa.jvp_problems(*x, **options),
    "weight_sums_problems": lambda x, options: cupy_sdpa.weight_sums_problems(*x[:2], **options),
    "widen": lambda x, options: cupy_sdpa.widen(x[0], x[1], x[2], x[0], **options),
    "fp8.attention": lambda x, options: fp8.attention(*(fp8.quantize(a, layout=options.get("layout")) for a in x), **options),
}  # fmt: skip


def function(name):
    """A public function by its name."""
    found = cupy_sdpa
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_function_with_options_is_listed():
    """All public functions whose signature shows the option causal, except those that name it themselves."""
    own = {"dropout_mask", "block_mask"}
    found = set()
    for prefix, module in {"": cupy_sdpa, "fp8.": fp8}.items():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) and {"softcap", "options"} & inspect.signature(value).parameters.keys():
                found.add(prefix + name)
    assert found - own - {"explain_function"} == FUNCTIONS.keys()


@pytest.mark.parametrize("option", VALID)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_show_the_options_that_are_taken(name, option):
    """A call takes every option that its signature shows, and refuses the others with a message that names them."""
    options = dict(VALID[option])
    x = arrays(options)
    if option in inspect.signature(function(name)).parameters:
        FUNCTIONS[name](x, options)
    elif name == "widen" and option not in ("page_table", "num_splits"):  # it reads nothing else
        made = cupy_sdpa.widen(*x, x[0], **options).form
        assert made == cupy_sdpa.widen(*x, x[0], **{n: y for n, y in options.items() if n in SELECTING}).form
    else:
        with pytest.raises((TypeError, ValueError, cupy_sdpa.Unsupported), match="|".join(options)):
            FUNCTIONS[name](x, options)


#: The options that select the form of a derivative.
SELECTING = ("deterministic", "score_mod", "tensors", "dropout_p", "seed", *OF_PACKED)


def test_every_option_is_tested():
    """The table has the options of attention, which takes all."""
    flags = {"q", "k", "v", "return_stats", "deterministic", "out", "stats"}
    assert VALID.keys() | flags == inspect.signature(cupy_sdpa.attention).parameters.keys()


def test_the_help_of_attention_is_one_screen():
    """It names every option once and refers to the page that defines them."""
    text = pydoc.render_doc(cupy_sdpa.attention, renderer=pydoc.plaintext)
    doc = inspect.getdoc(cupy_sdpa.attention)
    assert len(doc.splitlines()) <= 50  # the length of the signature depends on Python: from 3.13 on a line for each parameter
    assert "causal: bool | Literal['top_left', 'bottom_right'] | None = False" in text.replace('"', "'")
    assert ":doc:`/options`" in doc
    documented = re.findall(r"^    ([\w, ]+): ", doc, re.M)
    names = [name for line in documented for name in line.split(", ") if name in VALID]
    assert sorted(names) == sorted(VALID)


def test_the_page_defines_every_option():
    """Each has an anchor, a definition after it, and a place in the table of groups."""
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    flags = {"deterministic", "out", "stats", "return_stats", "return_dbias", "return_dsinks", "return_dtensors"}
    groups = re.search(r"^\| group \|.*?\n\n", page, re.M | re.S)[0]
    for name in VALID.keys() | flags:
        (place,) = [match.end() for match in re.finditer(rf"^\({name.replace('_', '-')}\)=$", page, re.M)]
        terms = re.match(r"(?:\n\([\w-]+\)=)*\n(.*)\n: ", page[place:])[1]
        assert f"`{name}`" in terms, name
        assert groups.count(f"`{name}`") == 1, name
    assert re.findall(r"^\| \[([\w ]+)\]", groups, re.M) == [title.lower() for title in re.findall(r"^## (.*)$", page, re.M)]


MODULES = ("fp8", "layout", "nnlib", "parallel", "reference", "store", "zoo")


@pytest.mark.parametrize("name", MODULES)
def test_completion_offers_public_names(name):
    """In every public module."""
    module = importlib.import_module(f"cupy_sdpa.{name}")
    assert dir(module) == sorted(module.__all__)


def test_completion_of_block_masks_offers_public_names():
    """Of the class and of a mask: what the documentation lists."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = sorted(re.search(r"autoclass:: BlockMask\n   :members: (.*)", page)[1].split(", "))
    assert [name for name in dir(cupy_sdpa.BlockMask) if name[0] != "_"] == listed
    assert dir(VALID["block_mask"]["block_mask"]) == listed
