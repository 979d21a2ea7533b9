"""One TensorFlow graph with most ops of the shape table, each with the attributes that change its shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SIZES = {"x": (4,), "image": (8, 9, 4), "sequence": (6, 4), "ids": (3,), "volume": (5, 6, 7, 2)}
"""Inputs by name with their sizes after the batch."""


def feeds(batch: int) -> dict[str, Any]:
    """Values for the inputs."""
    import numpy as np

    rng = np.random.default_rng(0)
    values: dict[str, Any] = {
        f"{name}:0": rng.uniform(0.1, 1, (batch, *sizes)).astype(np.float32) for name, sizes in SIZES.items()
    }
    values["ids:0"] = rng.integers(0, 5, (batch, 3)).astype(np.int32)
    return values


def build(batch: int | None) -> Any:
    """The graph as a GraphDef, inputs with the given batch."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        inputs = {
            name: tf.compat.v1.placeholder(tf.int32 if name == "ids" else tf.float32, (batch, *sizes), name=name)
            for name, sizes in SIZES.items()
        }
        for maker in (
            _elementwise,
            _arrays,
            _slices,
            _shape_arithmetic,
            _nn,
            _reductions,
            _products,
            _gathers,
            _boxes,
            _state,
            _linear_algebra,
            _xla,
        ):
            with tf.name_scope(maker.__name__.strip("_")):
                list(maker(tf, tf.raw_ops, **inputs))
    return graph.as_graph_def()


def _elementwise(tf: Any, raw: Any, x: Any, image: Any, ids: Any, **_: Any) -> Iterator[Any]:
    for name in (
        "Relu",
        "Tanh",
        "Sigmoid",
        "Exp",
        "Erf",
        "Rsqrt",
        "Softplus",
        "Floor",
        "IsNan",
        "ZerosLike",
        "OnesLike",
        "Elu",
    ):
        op = getattr(raw, name)
        yield op(**{("features" if name in ("Relu", "Softplus", "Elu") else "x"): x})
    row = tf.constant([[1.0], [2.0], [3.0]])
    for name in ("AddV2", "Sub", "Mul", "Maximum", "RealDiv", "SquaredDifference", "Pow", "FloorDiv", "DivNoNan"):
        yield getattr(raw, name)(x=tf.expand_dims(x, 1), y=row)
    yield raw.Greater(x=x, y=tf.constant(0.5))
    yield raw.LogicalAnd(x=x > 0.0, y=x < 1.0)
    yield raw.Cast(x=x, DstT=tf.float16)
    yield raw.AddN(inputs=[x, x, x])
    yield raw.SelectV2(condition=tf.constant([True, False, True, False]), t=tf.expand_dims(x, 1), e=row)
    yield raw.Select(condition=x > 0.5, x=x, y=x)
    yield raw.ClipByValue(t=x, clip_value_min=tf.constant(0.0), clip_value_max=tf.constant(1.0))
    yield raw.Bucketize(input=x, boundaries=[0.1, 0.5])
    yield raw.Bitcast(input=x, type=tf.uint8)
    yield raw.Bitcast(input=raw.Bitcast(input=x, type=tf.uint8), type=tf.float32)
    yield raw.LeakyRelu(features=x)
    yield raw.ReluGrad(gradients=x, features=x)
    yield raw.Complex(real=x, imag=x)


def _arrays(tf: Any, raw: Any, x: Any, image: Any, sequence: Any, ids: Any, **_: Any) -> Iterator[Any]:
    yield raw.Reshape(tensor=image, shape=[-1, 8 * 9, 4])
    yield raw.Reshape(tensor=image, shape=[8, -1])
    yield raw.ExpandDims(input=x, axis=-1)
    yield raw.Squeeze(input=raw.ExpandDims(input=x, axis=1), axis=[1])
    yield raw.Squeeze(input=tf.zeros([1, 3, 1]))
    yield raw.ConcatV2(values=[x, x, x], axis=-1)
    yield raw.Concat(concat_dim=1, values=[x, x])
    yield raw.Pack(values=[x, x], axis=1)
    yield raw.Unpack(value=sequence, num=6, axis=1)
    yield raw.Split(axis=1, value=sequence, num_split=3)
    yield raw.SplitV(value=sequence, size_splits=[1, -1, 2], axis=1, num_split=3)
    yield raw.Transpose(x=image, perm=[0, 3, 1, 2])
    yield raw.Tile(input=x, multiples=[2, 3])
    yield raw.Pad(input=image, paddings=[[0, 0], [1, 2], [0, 3], [0, 0]])
    yield raw.PadV2(input=x, paddings=[[0, 0], [1, 2]], constant_values=1.0)
    yield raw.MirrorPad(input=x, paddings=[[0, 0], [1, 2]], mode="REFLECT")
    yield raw.OneHot(indices=ids, depth=7, on_value=1.0, off_value=0.0, axis=-1)
    yield raw.OneHot(indices=ids, depth=7, on_value=1.0, off_value=0.0, axis=1)
    yield raw.BroadcastTo(input=tf.constant([1.0, 2.0]), shape=[3, 2])
    yield raw.Fill(dims=[2, 3], value=1.0)
    yield raw.Range(start=2, limit=11, delta=3)
    yield raw.Range(start=9, limit=2, delta=-3)
    yield raw.LinSpace(start=0.0, stop=1.0, num=5)
    yield raw.Cumsum(x=x, axis=1)
    yield raw.ReverseV2(tensor=x, axis=[1])
    yield raw.Roll(input=x, shift=1, axis=1)
    yield raw.MatrixDiag(diagonal=x)
    yield raw.MatrixDiagPart(input=image[..., 0])
    yield raw.MatrixBandPart(input=image[..., 0], num_lower=1, num_upper=1)
    yield raw.TopKV2(input=x, k=2)
    yield raw.DepthToSpace(input=image, block_size=2)
    yield raw.SpaceToDepth(input=image[:, :, :8], block_size=2)
    yield raw.SpaceToBatchND(input=image, block_shape=[2, 3], paddings=[[0, 0], [0, 0]])
    yield raw.BatchToSpaceND(
        input=raw.SpaceToBatchND(input=image, block_shape=[2, 3], paddings=[[0, 0], [0, 0]]),
        block_shape=[2, 3],
        crops=[[1, 0], [0, 2]],
    )
    yield raw.ExtractImagePatches(
        images=image, ksizes=[1, 3, 3, 1], strides=[1, 2, 2, 1], rates=[1, 1, 1, 1], padding="VALID"
    )
    yield raw.IdentityN(input=[x, ids])
    yield raw.EnsureShape(input=x, shape=[None, 4])
    yield raw.Where(condition=x > 0.5)
    yield raw.InvertPermutation(x=[2, 0, 1])
    yield raw.SpaceToBatch(input=image, paddings=[[0, 0], [1, 2]], block_size=2)
    yield raw.BatchToSpace(input=tf.zeros([8, 3, 4, 2]), crops=[[1, 0], [0, 2]], block_size=2)
    for band in ([0], [1], [-2], [-1, 2]):
        part = raw.MatrixDiagPartV3(input=image[..., 0], k=band, padding_value=0.0)
        yield part
        yield raw.MatrixDiagV3(diagonal=part, k=band, num_rows=-1, num_cols=-1, padding_value=0.0)
    yield raw.MatrixDiagV3(diagonal=x, k=1, num_rows=-1, num_cols=7, padding_value=0.0)
    yield raw.MatrixDiagV3(diagonal=x, k=-1, num_rows=6, num_cols=-1, padding_value=0.0)
    yield raw.UnravelIndex(indices=[3, 5], dims=[2, 4])
    yield raw.RFFT(input=x, fft_length=[4])
    yield raw.IRFFT(input=raw.RFFT(input=x, fft_length=[4]), fft_length=[4])
    yield raw.RFFT2D(input=image[..., 0], fft_length=[8, 9])
    yield raw.GuaranteeConst(input=tf.constant([1.0]))


def _slices(tf: Any, raw: Any, x: Any, image: Any, **_: Any) -> Iterator[Any]:
    yield raw.Slice(input=image, begin=[0, 1, 2, 0], size=[-1, 3, -1, 2])
    yield image[:, 1:-1, ::2]
    yield image[:, ::-1, 7:2:-2]
    yield image[..., 0]
    yield image[:, tf.newaxis, 1]
    yield image[:, -3:, None, ..., 1:3]
    yield image[:, 2:2]
    yield image[0]
    yield x[:, 10:]


def _shape_arithmetic(tf: Any, raw: Any, x: Any, image: Any, sequence: Any, ids: Any, **_: Any) -> Iterator[Any]:
    shape = tf.shape(image)
    yield raw.Size(input=image)
    yield raw.Rank(input=image)
    yield raw.ShapeN(input=[x, image])
    yield tf.reshape(image, tf.stack([shape[0], shape[1] * shape[2], shape[3]]))
    yield tf.reshape(image, tf.concat([shape[:1], [-1]], 0))
    yield tf.reshape(image, [shape[0], tf.reduce_prod(shape[1:])])
    yield tf.zeros(tf.concat([shape[:1], [5]], 0))
    yield tf.fill(tf.stack([shape[0], 3]), 1.0)
    yield tf.broadcast_to(x[:1], tf.shape(x))
    yield tf.tile(x, tf.stack([1, shape[1] // 4]))
    yield tf.range(shape[1])
    yield from raw.RaggedTensorToSparse(rt_nested_splits=[tf.constant([0, 1, 4], tf.int64)], rt_dense_values=x[0])
    splits = [tf.constant([0, 1, 2], tf.int64), tf.constant([0, 2, 6], tf.int64)]
    yield from raw.RaggedTensorToSparse(rt_nested_splits=splits, rt_dense_values=sequence[0])
    yield tf.zeros(tf.gather(shape, [1, 2]))
    yield tf.zeros(tf.cast(tf.cast(shape[1:3], tf.float32) * 1.5, tf.int32))
    yield tf.zeros(tf.maximum(shape[1:3], 9))
    yield tf.zeros(shape[1:3] - 1)
    yield tf.zeros(tf.where(shape[1:3] > 8, shape[1:3], [1, 1]))
    yield tf.image.resize(image, tf.shape(image)[1:3] * 2)
    yield tf.tensordot(image, tf.zeros([4, 6]), 1)
    yield tf.tensordot(sequence, tf.zeros([4, 2, 3]), [[2], [0]])
    yield tf.broadcast_dynamic_shape(tf.shape(x), tf.constant([1, 4]))
    yield tf.unstack(shape, num=4)


def _nn(tf: Any, raw: Any, x: Any, image: Any, volume: Any, sequence: Any, **_: Any) -> Iterator[Any]:
    kernel = tf.zeros([3, 2, 4, 6])
    for padding in ("SAME", "VALID"):
        for stride in (1, 2, 3):
            yield raw.Conv2D(input=image, filter=kernel, strides=[1, stride, stride, 1], padding=padding)
            yield raw.MaxPool(input=image, ksize=[1, 3, 2, 1], strides=[1, stride, 1, 1], padding=padding)
            yield raw.AvgPool(value=image, ksize=[1, 2, 2, 1], strides=[1, stride, stride, 1], padding=padding)
        yield raw.Conv2D(input=image, filter=kernel, strides=[1] * 4, padding=padding, dilations=[1, 2, 3, 1])
        yield raw.DepthwiseConv2dNative(
            input=image, filter=tf.zeros([3, 3, 4, 2]), strides=[1, 2, 2, 1], padding=padding
        )
        yield raw.Conv3D(input=volume, filter=tf.zeros([2, 3, 2, 2, 5]), strides=[1, 2, 1, 1, 1], padding=padding)
    yield raw.Conv2D(
        input=image, filter=kernel, strides=[1, 1, 2, 1], padding="EXPLICIT", explicit_paddings=[0, 0, 1, 2, 3, 0, 0, 0]
    )
    yield raw.Conv2D(input=image, filter=tf.zeros([3, 3, 2, 6]), strides=[1] * 4, padding="SAME")
    yield tf.nn.conv1d(sequence, tf.zeros([3, 4, 5]), 1, "SAME")
    yield tf.nn.conv2d_transpose(image, tf.zeros([3, 3, 7, 4]), tf.stack([tf.shape(image)[0], 16, 18, 7]), 2)
    yield raw.Conv2DBackpropFilter(
        input=image, filter_sizes=[3, 2, 4, 6], out_backprop=tf.zeros([1, 8, 9, 6]), strides=[1] * 4, padding="SAME"
    )
    yield raw.BiasAdd(value=image, bias=tf.zeros([4]))
    yield raw.BiasAddGrad(out_backprop=image)
    yield raw.FusedBatchNormV3(
        x=image, scale=tf.ones([4]), offset=tf.zeros([4]), mean=tf.zeros([4]), variance=tf.ones([4]), is_training=False
    )[:5]
    yield raw.Softmax(logits=x)
    yield raw.LogSoftmax(logits=x)
    yield raw.LRN(input=image)
    yield raw.SoftmaxCrossEntropyWithLogits(features=x, labels=x)
    yield raw.L2Loss(t=x)
    yield raw.InTopKV2(predictions=tf.zeros([2, 5]), targets=[1, 2], k=2)
    yield raw.ResizeBilinear(images=image, size=[5, 6])
    yield raw.ResizeNearestNeighbor(images=image, size=[16, 18])
    yield raw.MaxPoolGrad(
        orig_input=image, orig_output=image, grad=image, ksize=[1] * 4, strides=[1] * 4, padding="SAME"
    )


def _boxes(tf: Any, raw: Any, image: Any, **_: Any) -> Iterator[Any]:
    boxes, scores = image[0, :, :, 0][:, :4], image[0, :, 0, 1]
    limits = {"max_output_size": 3, "iou_threshold": 0.5, "score_threshold": 0.0}
    yield raw.NonMaxSuppressionV4(boxes=boxes, scores=scores, pad_to_max_output_size=True, **limits)
    yield raw.NonMaxSuppressionV4(boxes=boxes, scores=scores, **limits)
    for pad in (True, False):
        yield raw.NonMaxSuppressionV5(
            boxes=boxes, scores=scores, soft_nms_sigma=0.0, pad_to_max_output_size=pad, **limits
        )
    for pad in (True, False):
        yield raw.CombinedNonMaxSuppression(
            boxes=image[:, :, :1, :],
            scores=image[:, :, 0, :],
            max_output_size_per_class=2,
            max_total_size=20,
            iou_threshold=0.5,
            score_threshold=0.0,
            pad_per_class=pad,
        )


def _reductions(tf: Any, raw: Any, x: Any, image: Any, **_: Any) -> Iterator[Any]:
    for keep in (False, True):
        yield raw.Mean(input=image, axis=[1, 2], keep_dims=keep)
        yield raw.Sum(input=image, axis=-1, keep_dims=keep)
        yield raw.Max(input=image, axis=[0, 1, 2, 3], keep_dims=keep)
        yield raw.All(input=x > 0.0, axis=[1], keep_dims=keep)
    yield raw.ArgMax(input=image, dimension=2)
    yield raw.ArgMin(input=x, dimension=-1)
    yield tf.reduce_logsumexp(x, axis=1)


def _products(tf: Any, raw: Any, x: Any, image: Any, sequence: Any, **_: Any) -> Iterator[Any]:
    yield raw.MatMul(a=x, b=tf.zeros([4, 5]))
    yield raw.MatMul(a=x, b=tf.zeros([5, 4]), transpose_b=True)
    yield raw.MatMul(a=x, b=x, transpose_a=True)
    yield raw.BatchMatMulV2(x=sequence, y=tf.zeros([4, 3]))
    yield raw.BatchMatMulV2(x=image, y=image, adj_y=True)
    yield raw.Einsum(inputs=[sequence, tf.zeros([4, 2, 3])], equation="abc,cde->abde")
    yield raw.Einsum(inputs=[sequence, sequence], equation="bid,bjd->bij")
    yield raw.Einsum(inputs=[image, tf.zeros([4, 6])], equation="...c,cd->...d")
    yield raw.Einsum(inputs=[sequence], equation="bij->ji")


def _linear_algebra(tf: Any, raw: Any, image: Any, sequence: Any, volume: Any, **_: Any) -> Iterator[Any]:
    square = tf.matmul(sequence, sequence, transpose_a=True) + tf.eye(4)
    rhs = tf.transpose(sequence, [0, 2, 1])
    yield raw.MatrixSolve(matrix=square, rhs=rhs, adjoint=True)
    yield raw.MatrixTriangularSolve(matrix=square, rhs=rhs)
    yield raw.MatrixTriangularSolve(matrix=tf.eye(4), rhs=rhs)
    yield raw.MatrixTriangularSolve(matrix=tf.expand_dims(square, 1), rhs=tf.zeros([3, 4, 2]))
    yield raw.MatrixDeterminant(input=square)
    yield raw.LogMatrixDeterminant(input=square)
    yield raw.Lu(input=square)
    for full in (False, True):
        yield raw.Qr(input=sequence, full_matrices=full)
        yield raw.Svd(input=sequence, full_matrices=full)
    yield raw.SelfAdjointEigV2(input=square)
    row = tf.ones([1, 6])
    yield raw.TridiagonalMatMul(superdiag=row, maindiag=row, subdiag=row, rhs=tf.ones([6, 4]))
    yield raw.ApproxTopK(input=image, k=3)
    yield raw.HistogramFixedWidth(values=image, value_range=[0.0, 1.0], nbins=5)


def _xla(tf: Any, raw: Any, image: Any, sequence: Any, **_: Any) -> Iterator[Any]:
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops as made

    place = tf.zeros([4], tf.int32)
    yield made.xla_dynamic_update_slice(input=image, update=image[:, :2, :1], indices=place)
    yield made.xla_dynamic_slice(input=image, start_indices=place, size_indices=[1, 2, 9, 3])
    yield made.xla_sort(input=sequence)
    yield made.xla_key_value_sort(keys=sequence, values=sequence)
    yield made.xla_sharding(input=sequence, sharding="")
    yield made.xla_pad(
        input=sequence, padding_value=1.0, padding_low=[0, 1, -1], padding_high=[0, 2, -2], padding_interior=[0, 3, 0]
    )


def _gathers(tf: Any, raw: Any, x: Any, image: Any, sequence: Any, ids: Any, **_: Any) -> Iterator[Any]:
    table = tf.zeros([5, 7])
    yield raw.Gather(params=table, indices=ids)
    yield raw.GatherV2(params=table, indices=ids, axis=0)
    yield raw.GatherV2(params=image, indices=[1, 2], axis=2)
    yield raw.GatherV2(params=sequence, indices=ids, axis=1, batch_dims=1)
    yield raw.GatherNd(params=table, indices=raw.Pack(values=[ids, ids], axis=-1))
    yield raw.ScatterNd(indices=[[1], [2]], updates=tf.zeros([2, 7]), shape=[5, 7])
    yield raw.TensorScatterUpdate(tensor=table, indices=[[1]], updates=tf.zeros([1, 7]))
    yield raw.UnsortedSegmentSum(data=sequence[0], segment_ids=[0, 1, 1, 2, 2, 2], num_segments=3)
    yield raw.SegmentSum(data=sequence[0], segment_ids=[0, 0, 1, 1, 2, 2])
    yield raw.SparseSegmentSum(data=table, indices=[0, 2, 3], segment_ids=[0, 0, 1])
    yield raw.SparseSegmentMeanWithNumSegments(data=table, indices=[0, 2, 3], segment_ids=[0, 0, 1], num_segments=4)
    yield raw.Unique(x=[1, 2, 2])
    yield raw.DynamicPartition(data=sequence[0], partitions=[0, 1, 0, 1, 1, 0], num_partitions=2)
    yield raw.DynamicStitch(indices=[[0, 2], [1]], data=[tf.zeros([2, 4]), tf.zeros([1, 4])])
    yield raw.SparseToDense(sparse_indices=[[1]], output_shape=[4], sparse_values=[1.0], default_value=0.0)
    yield raw.SparseReshape(input_indices=[[0, 1]], input_shape=[4, 6], new_shape=[3, -1])
    yield raw.SparseFillEmptyRows(indices=[[0, 1]], values=[1.0], dense_shape=[4, 6], default_value=0.0)
    yield raw.SparseFillEmptyRowsGrad(reverse_index_map=[0, 2], grad_values=[1.0, 2.0, 3.0])
    yield raw.SparseTensorDenseMatMul(
        a_indices=tf.constant([[0, 1]], tf.int64),
        a_values=[1.0],
        a_shape=tf.constant([3, 4], tf.int64),
        b=tf.zeros([4, 2]),
    )
    yield raw.StringToHashBucketFast(input=tf.as_string(ids), num_buckets=5)
    types = {"key_dtype": tf.int64, "value_dtype": tf.float32}
    for values, table in (
        ([], raw.HashTableV2(**types)),
        ([], raw.MutableHashTableV2(**types)),
        ([3], raw.MutableHashTableOfTensorsV2(**types, value_shape=[3])),
        (
            [2, 3],
            raw.MutableDenseHashTableV2(
                empty_key=tf.constant(-1, tf.int64),
                deleted_key=tf.constant(-2, tf.int64),
                value_dtype=tf.float32,
                value_shape=[2, 3],
            ),
        ),
    ):
        yield raw.LookupTableFindV2(
            table_handle=table, keys=tf.constant([[1], [2]], tf.int64), default_value=tf.zeros(values)
        )


def _state(tf: Any, raw: Any, x: Any, sequence: Any, **_: Any) -> Iterator[Any]:
    variable = tf.compat.v1.get_variable("table", [6, 3], use_resource=True)
    yield tf.raw_ops.VariableShape(input=variable.handle)
    yield tf.gather(variable, [1, 2])
    old = tf.compat.v1.get_variable("old", [2, 3], use_resource=False)
    yield old + 1.0
    yield raw.RandomUniform(shape=[2, 3], dtype=tf.float32)
    yield raw.StatelessRandomUniformV2(
        shape=[2, 3], key=tf.constant([1], tf.uint64), counter=tf.constant([1, 2], tf.uint64), alg=1
    )
    listed = raw.TensorListFromTensor(tensor=tf.transpose(sequence, [1, 0, 2]), element_shape=[-1, 4])
    yield raw.TensorListStack(input_handle=listed, element_shape=[-1, 4], element_dtype=tf.float32)
    yield raw.TensorListLength(input_handle=listed)
    reserved = raw.TensorListReserve(element_shape=[-1, 4], num_elements=3, element_dtype=tf.float32)
    for place in range(3):
        reserved = raw.TensorListSetItem(input_handle=reserved, index=place, item=x)
    yield raw.TensorListStack(input_handle=reserved, element_shape=[-1, 4], element_dtype=tf.float32)
    yield raw.TensorListGetItem(input_handle=reserved, index=1, element_shape=[-1, 4], element_dtype=tf.float32)
    yield raw.LSTMBlockCell(
        x=x, cs_prev=tf.zeros([1, 5]), h_prev=tf.zeros([1, 5]), w=tf.zeros([9, 20]), wci=tf.zeros([5]), wcf=tf.zeros([5]),
        wco=tf.zeros([5]), b=tf.zeros([20])
    ) if x.shape[0] == 1 else x  # fmt: skip
    array = tf.TensorArray(tf.float32, size=6, element_shape=None)
    yield array.unstack(tf.transpose(sequence, [1, 0, 2])).stack()
