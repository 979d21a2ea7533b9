"""Each operation of StableHLO that is read, held against TensorFlow running the module: special values, edges and empties."""

import re
from zlib import crc32

import numpy as np
import pytest

import msplit
from msplit.errors import MsplitError
from tests import forked

ir = pytest.importorskip("jaxlib.mlir.ir")
pytestmark = pytest.mark.tf


_forked = forked.always(forked.parsing)


NAN, INF = np.nan, np.inf
FLOATS = np.array(
    [
        NAN,
        INF,
        -INF,
        0.0,
        -0.0,
        1,
        -1,
        0.5,
        -0.5,
        1.5,
        -2.5,
        0.49999997,
        3e38,
        88.8,
        -7,
        2147483520.0,
        -3e9,
        9.3e18,
        300,
        -128.9,
    ],
    np.float32,
)
I32 = np.array([-(2**31), 2**31 - 1, 0, 1, 2, 7, 31, 32, 33, -1, -2, -7], np.int32)
U8 = np.array([0, 1, 2, 7, 8, 9, 128, 200, 254, 255], np.uint8)
TYPES = {"float32": "f32", "int32": "i32", "uint8": "ui8", "bool": "i1", "int8": "i8", "int64": "i64"}
random = np.random.default_rng(0)


def typed(array, element=""):
    """The type of an array, as StableHLO writes it."""
    return "tensor<" + "".join(f"{size}x" for size in array.shape) + (element or TYPES[array.dtype.name]) + ">"


def pairs(values):
    """Every value with every other."""
    return tuple(np.ascontiguousarray(one.ravel()) for one in np.meshgrid(values, values))


def normal(*shape):
    return random.normal(size=shape).astype(np.float32)


def each(names, *arrays, attrs="", to=""):
    """Lines of functions of elements of all arguments, and the types of their results."""
    types = ", ".join(typed(one) for one in arrays)
    result = typed(arrays[0], to)
    args = ", ".join(f"%a{number}" for number in range(len(arrays)))
    return [(f'"stablehlo.{name}"({args}) {attrs} : ({types}) -> {result}', result) for name in names.split()]


def artifact(arrays, lines, kinds):
    """The bytecode of a module that gives what the lines do, each of one result; `kinds`: types of its arguments."""
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import stablehlo

    given = ", ".join(f"%a{number}: {one}" for number, one in enumerate(kinds or map(typed, arrays)))
    body = "\n".join(line if kind is None else f"%r{number} = {line}" for number, (line, kind) in enumerate(lines))
    names = [(f"%r{number}", kind) for number, (_, kind) in enumerate(lines) if kind]
    results, kinds = (", ".join(one[place] for one in names) for place in (0, 1))
    text = f"func.func public @main({given}) -> ({kinds}) {{\n{body}\nreturn {results} : {kinds}\n}}"
    text = f"module attributes {{jax.uses_shape_polymorphism = true}} {{\n{text}\n}}"
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    with ir.Context() as context:
        context.append_dialect_registry(registry)
        context.load_all_available_dialects()
        stablehlo.register_dialect(context)
        made = stablehlo.serialize_portable_artifact(ir.Module.parse(text), "1.8.0")
    return made, [kind for _, kind in names]


@pytest.fixture
def write(tmp_path):
    """Writes a graph of one module; gives its path and what TensorFlow makes of it."""
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    from msplit.engines.tensorflow import runtime

    runtime.keep_nan()
    dtypes = {short: tf.as_dtype(name) for name, short in TYPES.items()}

    def made(arrays, lines, kinds=(), open_axes=0):
        data, kinds = artifact(arrays, lines, kinds)
        with tf.Graph().as_default() as graph:
            sizes = [[None] * open_axes + list(one.shape[open_axes:]) for one in arrays]
            fed = [tf.compat.v1.placeholder(one.dtype, sizes[n], f"in{n}") for n, one in enumerate(arrays)]
            given = {"version": 10, "platforms": ["CPU"], "disabled_checks": []}
            tout = [dtypes[re.search(r"(\w+)>$", kind)[1].split("x")[-1]] for kind in kinds]
            results = gen_xla_ops.xla_call_module(
                fed,
                module=data,
                Sout=[None] * len(kinds),
                Tout=tout,
                dim_args_spec=[],
                function_list=[],
                has_token_input_output=False,
                **given,
            )
            named = [tf.identity(one, f"out{number}") for number, one in enumerate(results)]
        path = tmp_path / "model.pb"
        path.write_bytes(graph.as_graph_def().SerializeToString())

        def run():
            with tf.compat.v1.Session(graph=graph) as session:
                return session.run(named, dict(zip(fed, arrays, strict=True)))

        return path, run

    return made


MANY = ", ".join(["1.0, -2.5"] * 60)  # of more than 100 elements MLIR writes the bytes
HALVES = (f"dense<[{MANY}]> : tensor<120xbf16>", "dense<[[1.5, 0x7FC0, 0xFF80, 3.0e-5, -0.0]]> : tensor<1x5xbf16>")
CAPTURED = """%row = stablehlo.constant dense<[1.0, 2.0, 3.0]> : tensor<3xf32>
%wide = stablehlo.broadcast_in_dim %row, dims = [1] : (tensor<3xf32>) -> tensor<4x3xf32>
%zero = stablehlo.constant dense<0> : tensor<i32>
%one = stablehlo.constant dense<1> : tensor<i32>
%end = stablehlo.constant dense<3> : tensor<i32>
%last:2 = stablehlo.while(%turn = %zero, %sum = %a0) : tensor<i32>, tensor<4x3xf32>
cond {
  %go = stablehlo.compare LT, %turn, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.return %go : tensor<i1>
} do {
  %next = stablehlo.add %turn, %one : tensor<i32>
  %more = stablehlo.add %sum, %wide : tensor<4x3xf32>
  stablehlo.return %next, %more : tensor<i32>, tensor<4x3xf32>
}"""
COMPARED = "comparison_direction = #stablehlo<comparison_direction {}>"
PAIRS = {kind: pairs(values) for kind, values in (("f", FLOATS), ("i", I32), ("u", U8))}
UNARY = "abs ceil cosine exponential exponential_minus_one floor log_plus_one logistic negate round_nearest_even"
UNARY += " round_nearest_afz sign sine tanh is_finite sqrt"
WHOLE = "add subtract multiply divide remainder maximum minimum and or xor shift_left shift_right_logical"
IMAGE, KERNEL = normal(2, 6, 6, 4), normal(3, 3, 2, 6)
ORDER = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"


def compared(arrays, how):
    return [
        one
        for way in ["EQ", "NE", "LT", "LE", "GT", "GE"]
        for one in each("compare", *arrays, attrs=f"{{{COMPARED.format(way)}{how}}}", to="i1")
    ]


def dot(left, right, result, lists):
    names = ("lhs_batching", "rhs_batching", "lhs_contracting", "rhs_contracting")
    numbers = ", ".join(f"{name}_dimensions = {one}" for name, one in zip(names, lists, strict=True))
    kind = f"({typed(left)}, {typed(right)}) -> tensor<{result}xf32>"
    return [
        (
            f'"stablehlo.dot_general"(%a0, %a1) {{dot_dimension_numbers = #stablehlo.dot<{numbers}>}} : {kind}',
            f"tensor<{result}xf32>",
        )
    ]


def convolved(image, kernel, window, groups, result):
    kind = f"({typed(image)}, {typed(kernel)}) -> tensor<{result}xf32>"
    attrs = f"{{batch_group_count = 1 : i64, feature_group_count = {groups} : i64}}"
    return [
        (
            f"stablehlo.convolution(%a0, %a1) dim_numbers = {ORDER}, window = {{{window}}} {attrs} : {kind}",
            f"tensor<{result}xf32>",
        )
    ]


def reduced(x, result, start, op, attrs, name="reduce"):
    kind = TYPES[x.dtype.name]
    one = f"tensor<{kind}>"
    region = f"^b(%p: {one}, %q: {one}):\n%s = stablehlo.{op} %p, %q : {one}\nstablehlo.return %s : {one}"
    first = f"%i{crc32(repr((op, start, attrs)).encode())}"
    return [
        (f"{first} = stablehlo.constant dense<{start}> : tensor<{kind}>", None),
        (
            f'"stablehlo.{name}"(%a0, {first}) ({{\n{region}\n}}) {{{attrs}}} : ({typed(x)}, tensor<{kind}>) -> tensor<{result}{kind}>',
            f"tensor<{result}{kind}>",
        ),
    ]


ENDS = {"add": "0.0", "multiply": "1.0", "maximum": "0xFF800000", "minimum": "0x7F800000"}
MATRIX = np.array([[1, NAN, 2, 3], [INF, 1, -INF, 2], [-1, -0.0, 5, 2.5]], np.float32)
NOTHING = np.zeros((3, 0), np.float32)
PLACES = np.array([[0, 0], [-5, 1], [3, 9], [2**31 - 1, -(2**31)]], np.int32)
TABLE = normal(7, 3)
AT = np.array([[0], [6], [7], [-1], [2**31 - 1], [-(2**31)]], np.int32)
WINDOW = (
    "window_dimensions = array<i64: {}>, window_strides = array<i64: {}>, "
    "padding = dense<[[0, 0], {}, [0, 0]]> : tensor<3x2xi64>"
)
GATHER = (
    "{{dimension_numbers = #stablehlo.gather<offset_dims = [{}], collapsed_slice_dims = [0], start_index_map = [0], "
    "index_vector_dim = 1>, slice_sizes = array<i64: 1, 3>}}"
)
LESS = f'%c = "stablehlo.compare"(%p, %q) {{{COMPARED.format("LT")}}} : (tensor<i32>, tensor<i32>) -> tensor<i1>'
SORT = (
    f'"stablehlo.sort"(%a0) ({{\n^b(%p: tensor<i32>, %q: tensor<i32>):\n{LESS}\nstablehlo.return %c : tensor<i1>\n}}) '
    "{dimension = 1 : i64, is_stable = true} : "
)
CASE = (
    '"stablehlo.case"(%a1) ('
    + ", ".join(
        f"{{\n%n{number} = stablehlo.{op} %a0 : tensor<3xf32>\nstablehlo.return %n{number} : tensor<3xf32>\n}}"
        for number, op in enumerate(("negate", "abs", "tanh"))
    )
    + ") : (tensor<i32>) -> tensor<3xf32>"
)


def moved(start):
    """A slice and an update from a place on that may be out of range."""
    first = f"%p{crc32(start)}_"
    scalars = [(f"{first}{k} = stablehlo.constant dense<{int(at)}> : tensor<i32>", None) for k, at in enumerate(start)]
    slice_kind, update_kind = (
        f"({kinds}, tensor<i32>, tensor<i32>)" for kinds in ("tensor<4x5xf32>", "tensor<4x5xf32>, tensor<2x3xf32>")
    )
    return [
        *scalars,
        (
            f'"stablehlo.dynamic_slice"(%a0, {first}0, {first}1) {{slice_sizes = array<i64: 2, 3>}} : {slice_kind} -> tensor<2x3xf32>',
            "tensor<2x3xf32>",
        ),
        (
            f'"stablehlo.dynamic_update_slice"(%a0, %a1, {first}0, {first}1) : {update_kind} -> tensor<4x5xf32>',
            "tensor<4x5xf32>",
        ),
    ]


def padded(low, high, inside, result):
    attrs = f"edge_padding_low = array<i64: {low}>, edge_padding_high = array<i64: {high}>, interior_padding = array<i64: {inside}>"
    return [
        (
            f'"stablehlo.pad"(%a0, %a1) {{{attrs}}} : (tensor<5xf32>, tensor<f32>) -> tensor<{result}xf32>',
            f"tensor<{result}xf32>",
        )
    ]


def gathered(offset, result):
    return [
        (
            f'"stablehlo.gather"(%a0, %a1) {GATHER.format(offset)} : (tensor<7x3xf32>, tensor<6x1xi32>) -> tensor<{result}>',
            f"tensor<{result}>",
        )
    ]


CASES = {
    "floats": (
        (FLOATS,),
        [line for name in UNARY.split() for line in each(name, FLOATS, to="i1" if name == "is_finite" else "")],
    ),
    "pairs of floats": (
        PAIRS["f"],
        each("add subtract multiply divide maximum minimum power remainder", *PAIRS["f"]) + compared(PAIRS["f"], ""),
    ),
    "integers": (
        PAIRS["i"],
        each(f"{WHOLE} shift_right_arithmetic", *PAIRS["i"]) + compared(PAIRS["i"], ""),
    ),
    "bytes": (
        PAIRS["u"],
        each(WHOLE, *PAIRS["u"]) + compared(PAIRS["u"], ", compare_type = #stablehlo<comparison_type UNSIGNED>"),
    ),
    "conversions": (
        (FLOATS,),
        [line for kind in ("i32", "i8", "ui8", "i64", "i1") for line in each("convert", FLOATS, to=kind)]
        + each("bitcast_convert", FLOATS, to="i32"),
    ),
    "clamp and select": (
        (FLOATS, np.float32(3), np.float32(2)),
        [
            (
                f'"stablehlo.clamp"({args}) : (tensor<f32>, tensor<20xf32>, tensor<f32>) -> tensor<20xf32>',
                "tensor<20xf32>",
            )
            for args in ("%a1, %a0, %a2", "%a2, %a0, %a1")
        ],
    ),
    "products": (
        (normal(2, 3, 4), normal(2, 4, 3)),
        [
            line
            for result, lists in (
                ("2x3x3", ([0], [0], [2], [1])),
                ("2x4x4", ([0], [0], [1], [2])),
                ("2x3x2x3", ([], [], [2], [1])),
                ("3x2x2", ([1], [2], [2], [1])),
                ("2x2", ([], [], [1, 2], [2, 1])),
                ("2x3x4x4x3", ([0], [0], [], [])),
            )
            for line in dot(normal(2, 3, 4), normal(2, 4, 3), result, lists)
        ],
    ),
    "convolutions": (
        (IMAGE, KERNEL),
        convolved(IMAGE, KERNEL, "stride = [2, 1], pad = [[1, 0], [2, 1]]", 2, "2x3x7x6")
        + convolved(IMAGE, KERNEL, "rhs_dilate = [2, 1]", 2, "2x2x4x6")
        + convolved(IMAGE, KERNEL, "pad = [[1, 1], [2, 1]], lhs_dilate = [2, 3]", 2, "2x11x17x6"),
    ),
    "reductions": (
        (MATRIX,),
        [
            line
            for op, start in ENDS.items()
            for axes, result in (("1", "3x"), ("0", "4x"), ("0, 1", ""))
            for line in reduced(MATRIX, result, start, op, f"dimensions = array<i64: {axes}>")
        ]
        + reduced(MATRIX, "3x", "2.5", "maximum", "dimensions = array<i64: 1>"),
    ),
    "reductions of nothing": (
        (NOTHING,),
        [
            line
            for op, start in ENDS.items()
            for line in reduced(NOTHING, "3x", start, op, "dimensions = array<i64: 1>")
        ],
    ),
    "windows": (
        (normal(2, 6, 3),),
        [
            line
            for op in ("add", "maximum")
            for size, step, pad, result in (
                ("1, 2, 1", "1, 2, 1", "[0, 0]", "2x3x3x"),
                ("1, 3, 1", "1, 1, 1", "[2, 1]", "2x7x3x"),
            )
            for line in reduced(
                normal(2, 6, 3),
                result,
                ENDS[op],
                op,
                WINDOW.format(size, step, pad),
                "reduce_window",
            )
        ]
        + reduced(
            normal(2, 6, 3),
            "2x6x3x",
            "0.0",
            "add",
            WINDOW.format("1, 6, 1", "1, 1, 1", "[0, 5]"),
            "reduce_window",
        ),
    ),
    "a cumulative sum of one element": (
        (normal(4, 1),),
        reduced(normal(4, 1), "4x1x", "0.0", "add", "window_dimensions = array<i64: 1, 1>", "reduce_window"),
    ),
    "numbers of four bits": (
        (),
        [
            ("%c = stablehlo.constant dense<[100, -9, 7]> : tensor<3xi32>", None),
            ("%few = stablehlo.convert %c : (tensor<3xi32>) -> tensor<3xi4>", None),
            ("stablehlo.convert %few : (tensor<3xi4>) -> tensor<3xi32>", "tensor<3xi32>"),
        ],
    ),
    "slices out of range": ((normal(4, 5), normal(2, 3)), [line for start in PLACES for line in moved(start)]),
    "padding": (
        (normal(5), np.float32(9)),
        padded(1, 2, 0, 8) + padded(-1, 2, 1, 10) + padded(-2, -1, 2, 10) + padded(3, -8, 0, 0),
    ),
    "gathers out of range": ((TABLE, AT), gathered("1", "6x3xf32") + gathered("0", "3x6xf32")),
    "gathers along two axes": (
        (normal(2, 7, 3, 4), PLACES),
        [
            (
                '"stablehlo.gather"(%a0, %a1) {dimension_numbers = #stablehlo.gather<offset_dims = [0, 2], collapsed_slice_dims = [1, 2], '
                f"start_index_map = [{order}], index_vector_dim = 1>, slice_sizes = array<i64: 2, 1, 1, 4>}} : "
                "(tensor<2x7x3x4xf32>, tensor<4x2xi32>) -> tensor<2x4x4xf32>",
                "tensor<2x4x4xf32>",
            )
            for order in ("1, 2", "2, 1")
        ],
    ),
    "a batch of any size": (
        (normal(6, 7), np.array([[1], [9]], np.int32)),
        [
            ("%n = stablehlo.get_dimension_size %a0, dim = 0 : (tensor<?x7xf32>) -> tensor<i32>", None),
            ("%one = stablehlo.constant dense<1> : tensor<1xi32>", None),
            ("%two = stablehlo.constant dense<2> : tensor<i32>", None),
            ("%half = stablehlo.divide %n, %two : tensor<i32>", None),
            ("%h = stablehlo.reshape %half : (tensor<i32>) -> tensor<1xi32>", None),
            ("%w = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>", None),
            ("%s = stablehlo.concatenate %h, %one, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>", None),
            (
                '"stablehlo.dynamic_gather"(%a0, %a1, %s) {dimension_numbers = #stablehlo.gather<offset_dims = [0], '
                "collapsed_slice_dims = [1], start_index_map = [1], index_vector_dim = 1>} : "
                "(tensor<?x7xf32>, tensor<2x1xi32>, tensor<2xi32>) -> tensor<?x2xf32>",
                "tensor<?x2xf32>",
            ),
            ("stablehlo.dynamic_iota %w, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>", "tensor<?xi32>"),
            (
                "stablehlo.dynamic_broadcast_in_dim %half, %w, dims = [] : (tensor<i32>, tensor<1xi32>) -> tensor<?xi32>",
                "tensor<?xi32>",
            ),
        ],
        ("tensor<?x7xf32>", "tensor<2x1xi32>"),
    ),
    "sorts": (
        (np.array([[3, 1, -(2**31), 2**31 - 1, 1, 0]] * 2, np.int32),),
        [(f"{SORT}(tensor<2x6xi32>) -> tensor<2x6xi32>", "tensor<2x6xi32>")],
    ),
    "broadcasts": (
        (normal(3, 2),),
        [
            (
                f'"stablehlo.broadcast_in_dim"(%a0) {{broadcast_dimensions = array<i64: {axes}>}} : (tensor<3x2xf32>) -> {kind}',
                kind,
            )
            for axes, result in (("0, 2", "3x4x2"), ("1, 0", "2x3"), ("1, 2", "0x3x2"), ("0, 1", "3x2"))
            for kind in [f"tensor<{result}xf32>"]
        ],
    ),
    "bfloat16 constants": (
        (),
        [
            line
            for number, text in enumerate(HALVES)
            for kind in [text.rpartition(" ")[2]]
            for line in (
                (f"%half{number} = stablehlo.constant {text}", None),
                (
                    f"stablehlo.convert %half{number} : ({kind}) -> {kind.replace('bf16', 'f32')}",
                    kind.replace("bf16", "f32"),
                ),
            )
        ],
    ),
    "a constant row broadcast outside of a loop": (
        (normal(4, 3),),
        [(CAPTURED, None), ("stablehlo.add %last#1, %wide : tensor<4x3xf32>", "tensor<4x3xf32>")],
    ),
    **{
        f"branch {number}": ((np.array([-1, 0.5, 2], np.float32), np.int32(number)), [(CASE, "tensor<3xf32>")])
        for number in (0, 2, 3, -1)
    },
}


@pytest.mark.parametrize("what", CASES)
def test_what_is_read_gives_what_tensorflow_gives_for_the_module(what, write):
    arrays, lines, *kinds = CASES[what]
    arrays = [np.asarray(one) for one in arrays]
    path, run = write(arrays, lines, *kinds)
    assert not any(op.startswith("stablehlo.") for op in msplit.load(path).graph.ops)
    step = msplit.prepare(path, engine="cuda", device="cpu", effort="fast")
    found = step(**{f"in{number}": one for number, one in enumerate(arrays)})
    kept = [line for line, kind in lines if kind]
    for number, (line, value) in enumerate(zip(kept, run(), strict=True)):
        got = found[f"out{number}"]
        assert got.dtype == value.dtype, line
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-6, err_msg=line)
        if line.startswith('"stablehlo.sign"'):  # -0 stays
            np.testing.assert_array_equal(np.signbit(got[3:5]), [False, True])


VECTOR = "tensor<20xf32>"
TOTAL = f"{{{COMPARED.format('LT')}, compare_type = #stablehlo<comparison_type TOTALORDER>}}"
NAMED = {
    "stablehlo.compare": (PAIRS["f"], each("compare", *PAIRS["f"], attrs=TOTAL, to="i1")),
    "stablehlo.abs": (
        PAIRS["f"],
        [
            (f"%z = stablehlo.complex %a0, %a1 : {typed(PAIRS['f'][0], 'complex<f32>')}", None),
            (
                f"stablehlo.abs %z : ({typed(PAIRS['f'][0], 'complex<f32>')}) -> {typed(PAIRS['f'][0])}",
                typed(PAIRS["f"][0]),
            ),
        ],
    ),
    "stablehlo.constant": (
        (),
        [
            ("%z = stablehlo.constant dense<[(1.0, 2.0), (0.0, 1.0)]> : tensor<2xcomplex<f32>>", None),
            ("stablehlo.real %z : (tensor<2xcomplex<f32>>) -> tensor<2xf32>", "tensor<2xf32>"),
        ],
    ),
    "stablehlo.cbrt": ((FLOATS,), each("cbrt", FLOATS)),
    "stablehlo.power": (PAIRS["i"], each("power", *PAIRS["i"])),
    "stablehlo.custom_call.evil_0A_1B_31m": (
        (FLOATS,),
        [(f'stablehlo.custom_call @"evil\\0A\\1B[31m"(%a0) : ({VECTOR}) -> {VECTOR}', VECTOR)],
    ),
    "stablehlo.sort": (
        (FLOATS[None],),
        [(f"{SORT.replace('i32', 'f32')}({typed(FLOATS[None])}) -> {typed(FLOATS[None])}", typed(FLOATS[None]))],
    ),
    "stablehlo.reduce": ((MATRIX,), reduced(MATRIX, "3x", "0.0", "subtract", "dimensions = array<i64: 1>")),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_has_no_exact_counterpart_is_named(name, write, monkeypatch):
    """With TensorFlow at hand or without."""
    from msplit.engines.tensorflow.engine import TensorFlowEngine

    path, _ = write([np.asarray(one) for one in NAMED[name][0]], NAMED[name][1])
    assert name in msplit.load(path).graph.ops
    monkeypatch.setattr(TensorFlowEngine, "unavailable", lambda self: "TensorFlow is not installed")
    with pytest.raises(MsplitError, match=re.escape(name)):
        msplit.prepare(path, engine="cuda", device="cpu", effort="fast")


def test_a_wrong_translation_is_refused_where_it_matters(write, monkeypatch):
    """Planted: a shift beyond the width of its type that gives what a CPU gives, and a maximum that loses NaN."""
    from msplit.formats import stablehlo_ops

    for kind, name, op in (("i", "shift_left", "LeftShift"), ("f", "maximum", "Minimum")):

        def wrong(step, op=op):
            return step.body.each(op, *step.args)

        with monkeypatch.context() as patch:
            patch.setitem(stablehlo_ops.ELEMENTS, name, wrong)
            path, _ = write(PAIRS[kind], each(name, *PAIRS[kind]))
            with pytest.raises(MsplitError, match="other outputs than TensorFlow"):
                msplit.prepare(path, engine="cuda", device="cpu", effort="fast")


def test_what_jaxlib_stumbles_over_is_an_error_of_the_file(write, monkeypatch):
    """Such as a name that is no text, of which jaxlib raises a `RuntimeError`."""
    from msplit.formats import stablehlo_ops

    def stumbles(step):
        raise RuntimeError("nanobind: conversion error!")

    monkeypatch.setitem(stablehlo_ops.ELEMENTS, "abs", stumbles)
    path, _ = write((FLOATS,), each("abs", FLOATS))
    with pytest.raises(MsplitError, match=r"stablehlo\.abs that can not be read: nanobind"):
        msplit.load(path)


def test_lengths_hide_nothing_inside_of_a_module(write):
    """TensorFlow runs it as a whole, so that no mask goes in front of an op of it. Where none is needed it runs."""
    kind, options = "tensor<?x?x4xf32>", {"lengths": [4], "batch": 2, "device": "cpu", "effort": "fast"}
    total = f"stablehlo.reduce(%a0 init: %z) applies stablehlo.add across dimensions = [1] : ({kind}, tensor<f32>) -> tensor<?x4xf32>"
    zero = ("%z = stablehlo.constant dense<0.0> : tensor<f32>", None)
    path, _ = write([normal(2, 3, 4)], [zero, (total, "tensor<?x4xf32>")], [kind], open_axes=2)
    with pytest.raises(MsplitError, match="can not be padded") as refused:
        msplit.prepare(path, **options)
    assert "inside of a module that JAX wrote" in refused.value.details[0]
    path, _ = write([normal(2, 3, 4)], [(f"stablehlo.tanh %a0 : {kind}", kind)], [kind], open_axes=2)
    with msplit.prepare(path, **options) as runner:
        assert runner.step({"in0": normal(2, 3, 4)})["out0"].shape == (2, 3, 4)
