"""What msplit knows of TensorFlow's ops: one row per op, or per family of ops that are alike.

`TRAITS` says what each word means and, in parentheses, which other words go with it. `ROWS` has the words of each op; what no row names has
no traits. A word with a number is a field of `Traits`. A new op is a row here, a lowering and a test.

    ops_with("comparison")          every comparison
    traits("Sigmoid").flops         4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TRAITS = """
# Shapes
forwards (same shape): Gives on its first input, what that refers to included.
same shape: Its only output has the shape of its first input.
operands agree (rounds smoothly, per element, masks elementwise): The gradient of a function of one element: result and operands have
  the same shape.
broadcasts (per element): Broadcasts two operands as NumPy does.
dynamic: The shape of its result depends on values.
dense if its input is (dynamic): Of these: each row's ids one behind the other give dense rows.
shape of (static, asks for shapes): Tells its input's shape, size or rank.
static (free): Its value follows from what its inputs are, not from their values.
asks for shapes (free): Asks for the shape only, as gradients do of all that may be broadcast.

# Element by element
unary (same shape, stacks, per element, masks elementwise): A function of one element that the cuda engine computes alike in every kernel.
binary (broadcasts, stacks, masks elementwise): A function of two elements, with NumPy's broadcasting, that it computes alike in every
  kernel.
comparison (binary, keeps two values): Of two numbers: a truth value.
logic (binary, exact, commutative, keeps two values): Of two truth values.
exact: Has one correct result, without rounding: what reads it may be sensitive to the last bit.
step (unary): Of one element: the result jumps, so that a last bit more or less in front of it shows.
curve (unary): Of one floating point number: the result is rounded.
arithmetic (binary): Of two numbers: the result is rounded where they are floating point.
rounds smoothly: Computed element by element beside curves and arithmetic: a last bit more or less stays one.
stacks: Computed for several branches at once, element by element.
commutative: The order of its operands says nothing.
add (arithmetic, commutative, linear): Adds two numbers.
linear: Of means, its result is the mean of its results.
multiply: Scales by a factor or its reciprocal.
divide (multiply): Divides two numbers of one type.
integer division: Undefined for a divisor of 0.
limit (exact): Keeps values in a range.
select (exact, masks elementwise, passes values, moves): Takes elements of two inputs, one by one.
one type: Its result has the type of its first input.
masks elementwise: Works on the kept elements of a masked tensor alone.
wraps: Unsigned integers have the bits that signed ones have, overflow included.
ordered: Needs the order of its elements only, which a shift of unsigned integers keeps.
exact when widened: Of unsigned integers: neither wraps around nor has an order that a shift keeps, right in a wider type.

# What stays apart
per element: Every element of its outputs is made of the elements of its inputs at the same place, once all are broadcast.
per vector: Treats each vector along the last axis by itself; what else it takes are parameters.
per matrix: Treats each matrix of the last two axes by itself.
per image: Treats each image of the last three axes by itself.
per item: Treats each item along the first axis by itself (images, signals), all with the same weights.

# Norms, activations and what they are made of
bias (same shape, rounds smoothly): Adds a vector along the channels.
batch norm (first port counts, rounds smoothly): Batch normalization with all that it gives for its gradient.
old batch norm (batch norm): Without a scratch output.
activation (unary): An activation that follows a bias in the same kernel.
epilogue step: A step of a fused op that is no activation.
gelu curve (curve, gelu part): A GELU has one of them.
gelu part: What a GELU is made of.
row part: What a layer norm or a softmax is made of, beside its reductions.
row reduction (reduction, row kernel): What they reduce with.
row start (row reduction): What they begin with.
softmax part: What a softmax has and a layer norm has not.
softmax (same shape, row kernel, per vector): Softmax or its logarithm, along the last axis.

# Products
convolution (vision, runs alone, per item): A convolution with a filter as its second input.
image convolution (convolution): Of images: four axes.
conv2d (vision, tensor cores, per item): With or without an epilogue.
matmul (product, one type): With or without an epilogue.
batch matmul (product): A product of matrices per element of the batch.
pool: The largest, or the mean, of each window.
vision: A model with it is one of images.
product (tensor cores): A product of matrices.
runs alone: Not done for several branches at once.
single cell: One step of a recurrent cell.

# Movement
view (passes values, linear): Launches nothing: its result lies where its input does. Stock TensorFlow copies.
reshape (view, unchanged by shape, keeps coordinates, hands on data, free): Gives its input's elements in the same order, with another
  shape. Behind a transposition it has to copy.
repeat (unchanged by shape, picks values, passes values): Repeats its input.
pad (unchanged by shape, moves): Adds a border.
stitch (moves): Puts parts together by their indices.
parts (join, any slot, moves): Writes its inputs side by side.
join: Branches meet in it.
concatenates: Writes its inputs one behind the other along an axis that they have.
unchanged by shape: Changes nothing where it does not change the shape.
picks values: Every element of its result is one of its input: the range of values stays.
keeps coordinates (picks values, passes values): Coordinates stay coordinates, and not negative.
not negative: Of operands that are not negative, its result is not either.
lower bound: Compares with a lower bound.
mask test: Makes the mask of what counts.
unique (dynamic): Of a vector.

# What hands on
identity (free, linear): Gives what it takes: who reads it reads what it reads.
hands on (identity): Hands its input on.
hands on parameters: Stands between a parameter and its use.
hands on tables: Stands between a table's content and what fills it.
hands on weights: Stands between a table and the lookup in it.
reads weights (hands on weights): Stands between a weight and the product with it.
hands on a condition: Stands between a condition and the Switch: hands it on, or negates it.
hands on a handle: Hands a handle or a reference on.
colocated: Lies with the variable whose handle it gives on.
host passes: Runs where its neighbours run: on the host between host nodes.
stored: Computes nothing: a weight that is only kept in a narrow type rounds nothing.
passes values: An output holds values of its input.
hands on data: Launches nothing and hands on the data of its first input.
keeps one value: Of one value: what is fed is a scalar where the result has to be one.
keeps two values: Of two values: a scalar where the result has to be one and the other is.

# Lookups, strings and files
gather (cuts): Rows of a table by ids.
gather nd (cuts): Elements or slices of a table by coordinates.
sparse segment (dense if its input is): Rows of a table by ids, combined per segment.
dense segment (reduces): Of sorted segments of equal length: a reduction along an axis of their own.
reads rows behind a handle (reads state, cuts): Reads as many bytes through its handle as it writes.
all ports (passes values): All of its outputs hold values of its input.
any slot (passes values): Each of its inputs passes values on.
splits strings (passes values): Cuts strings into words.
finds (no effect): Looks keys up in a hash table.
parses examples: Reads tf.Example records.
decodes: Reads a format of its own out of strings.
decodes images (decodes): Of these: a picture.
needs a file: Reads a format that msplit makes no values of.
enters loops: Elements go into a function's body: what reads them is there.
ragged: Works with the row splits of a ragged tensor, where a StridedSlice cuts them.

# State
variable (no effect, free): A variable, by handle or by reference, whose value a checkpoint holds.
reference variable (variable): Of these: its output is a reference.
temporary variable: A reference that lives for a part of a step.
handle (free): Makes the handle of a variable, DeepRec's embedding variables among them.
assigns (moves, no result): Gives a variable its value.
changes rows: Changes rows of a variable at indices.
adds rows (changes rows): Of these: adds to them or subtracts from them.
reads by handle (reads state, no effect): Only reads the variable whose handle it takes.
reads by reference: Only reads the variable that it takes as a reference.
reads state: Takes a handle or a reference and changes nothing. What is not here, custom ops included, may write.
no effect: Stateful, but only makes or reads something: nobody misses it when nobody uses what it gives.
repeatable (free): Stateful, but twice the same is no more than once.
never merged: Two of them are never the same: inputs, and what enters or leaves a loop.
fills a table: Fills a hash table.
fills a table from constants (fills a table): Fills a hash table from constants.
fills a table from a file (fills a table): Fills a hash table from a file.

# Ends of a graph
constant (runs where it is read, free): A constant.
placeholder (free): Stands for what is fed or passed in.
fed (placeholder, never merged, runs where it is read): Of these: has to be fed.
parameter (free): A parameter or result of a function.
data source: Gives a graph its data where it has no placeholders.
checkpoint (no result): Saves or restores a checkpoint.
no result: No result of a model though nothing consumes it.
summary (left over): Makes an entry of a log. What only it reads, such as a loss, is a result all the same.
left over: And what reads a variable back, looks at shapes for gradients, or prints: a result only where there is no other.
first port counts: Its further outputs only serve its gradient, or say which side a Merge took.
array value: Of tensor arrays: gives values; others give handles, and numbers that only order them.
hands on file names: Stands between the file name of a saver and the saver.
silent: No work of the model in TensorFlow's timeline.
runs where it is read: Runs where what reads it runs.

# Control flow and functions
switch (hands on a handle, no result, free): Control flow v1: gives its input to one of two outputs.
switch n: Control flow v1: to one of several outputs.
merge (first port counts, free): Control flow v1: gives on the input that comes.
xla merge: The same where XLA compiles.
enter (forwards, hands on a handle, never merged, free): Control flow v1: into a loop.
exit (forwards, never merged, free): Control flow v1: out of a loop.
next (forwards, free): Control flow v1: into the next iteration.
while (enters loops, functional): Control flow v2: a loop.
if (enters loops, functional, branch): Control flow v2: one of two functions.
case (functional, branch): Control flow v2: one of several functions.
call (functional): Calls a function.
functional: Runs functions of the library, each node of which has a side of its own.

# Random numbers
draws: Random with a state: what it draws depends on how often it has run.
draws on device (draws, no effect, makes): Of these: the cuda engine runs it, once in every step.
draws classes: Of these: draws some of a range of classes.

# Kernels, as the cost model counts them
free: Launches no kernel: sources, handles, shape functions, control flow. Lists and arrays hand buffers around.
moves: Reads its inputs and writes its outputs and computes nothing to speak of.
cuts: Reads only as much of its first input as it writes.
makes: Only writes.
reduces: One operation per element of its inputs.
reduction (reduces): Reduces along axes.
combines: Makes one row of the rows that a lookup gives.
needs elements: Of nothing it has no value.
row kernel: Reads rows as a whole: a larger kernel ends in it or begins behind it.
tensor cores: Runs on tensor cores.
branch: Control flow v2: its first input chooses the function.
"""

ROWS = """
# What goes in and out of graphs and functions
_Arg: never merged, placeholder, parameter, silent, runs where it is read
Const: stored, constant, silent
ControlTrigger: no result, free
_DeviceArg: placeholder, parameter, runs where it is read
_DeviceRetval: parameter
HostConst: constant
_HostRecv _HostSend _Recv _Send: silent
IteratorGetNext: data source, free
IteratorGetNextSync QueueDequeueManyV2 QueueDequeueUpToV2 QueueDequeueV2: data source
NoOp: asks for shapes, no result, silent
Placeholder: hands on parameters, hands on tables, no effect, fed
PlaceholderV2: fed
PlaceholderWithDefault: hands on parameters, hands on tables, hands on a condition, host passes, passes values, keeps one value, never
  merged, placeholder, hands on file names
_Retval: forwards, parameter, silent

# Variables, tables and their readers
AnonymousHashTable AnonymousMutableDenseHashTable AnonymousMutableHashTable AnonymousMutableHashTableOfTensors FakeQueue HashTable
  LookupTableExport LookupTableSize MutableDenseHashTable MutableDenseHashTableV2 MutableHashTable MutableHashTableOfTensors
  MutableHashTableOfTensorsV2: no effect
Assign AssignVariableOp: assigns, writes 0
DestroyResourceOp Iterator IteratorV2 TFRA>CuckooHashTableOfTensors TFRA>HkvHashTableOfTensors: free
HashTableV2 MutableHashTableV2: no effect, free
InitializeTable InitializeTableV2 LookupTableImport LookupTableImportV2: fills a table from constants
InitializeTableFromDataset: fills a table
InitializeTableFromTextFile InitializeTableFromTextFileV2: fills a table from a file
IsVariableInitialized: same shape, reads by reference, reads state, no effect, no result, free
KvVarHandleOp: handle
LookupTableExportV2 LookupTableSizeV2: reads state, no effect
LookupTableFind: finds
LookupTableFindV2: finds, reads state
ReadVariableOp: reads weights, stored, keeps one value, reads by handle, left over, free
TemporaryVariable: temporary variable
VarHandleOp: stored, variable, handle, runs where it is read
Variable: reference variable
VariableShape: static, reads by handle
VariableV2: stored, reference variable
VarIsInitializedOp: reads by handle, no result, free

# Control flow
Abort: free
Assert PrintV2: repeatable, no result
BatchFunction For RemoteCall SymbolicGradient _While: functional
Case StatelessCase: case, scalars 0
Enter: hands on parameters, hands on tables, hands on weights, colocated, passes values, hands on data, keeps one value, enter
Exit: hands on a handle, exit
If StatelessIf: if, scalars 0
_If: functional, branch
LoopCond: forwards, free, scalars 0
Merge: hands on a handle, hands on data, any slot, merge
NextIteration: hands on a handle, next
PartitionedCall StatefulPartitionedCall: call
Print: same shape, repeatable, left over
RefEnter: enter
RefExit: exit
RefMerge: merge
RefNextIteration: next
RefSwitch: switch, scalars 1
StatelessWhile While: while
Switch: colocated, hands on data, all ports, switch, scalars 1
_SwitchN: switch n, free
_XlaMerge: xla merge

# Random numbers
AllCandidateSampler FixedUnigramCandidateSampler FractionalAvgPool FractionalMaxPool LearnedUnigramCandidateSampler
  Multinomial RandomCrop SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 ThreadUnsafeUnigramCandidateSampler: draws
LogUniformCandidateSampler UniformCandidateSampler: draws on device, draws classes
ParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2: no effect, draws
RandomGammaGrad: broadcasts
RandomShuffle: same shape, no effect, draws, moves
RandomStandardNormal: draws on device, flops 20
RandomUniform: draws on device, flops 10
RandomUniformInt: draws on device
StatefulStandardNormalV2 StatefulUniform StatelessRandomNormal StatelessRandomUniform StatelessRandomUniformInt
  StatelessRandomUniformIntV2 StatelessTruncatedNormal StatelessTruncatedNormalV2: makes
StatelessRandomGetAlg StatelessRandomGetKeyCounter: free
StatelessRandomNormalV2: makes, flops 20
StatelessRandomUniformV2: makes, flops 10
TruncatedNormal: draws on device, flops 25

# Identities
Bitcast: passes values, free
DebugGradientIdentity DebugGradientRefIdentity: forwards, free
DebugIdentityV2: same shape, free, per element
EnsureShape: unchanged by shape, picks values, hands on, hands on parameters, passes values
GuaranteeConst: forwards, identity
Identity: forwards, one type, keeps coordinates, hands on, hands on parameters, hands on tables, reads weights, hands on a condition,
  hands on a handle, colocated, host passes, stored, hands on data, keeps one value, hands on file names
IdentityN: host passes, stored, any slot, free
PreventGradient: same shape, hands on, host passes, passes values, hands on data
RefIdentity: forwards, hands on a handle, free
Snapshot: same shape, keeps coordinates, identity, hands on weights, host passes, hands on data
StopGradient: same shape, keeps coordinates, hands on, hands on parameters, hands on tables, hands on weights, host passes, stored, hands
  on data, keeps one value
XlaOptimizationBarrier: free

# Functions of one element, and others that keep the shape
Abs: unary, exact
Acos Acosh Asin Asinh Atan Atanh Cos Cosh Expm1 Sin Sinh Softsign Tan: curve
CheckNumerics CheckNumericsV2 DrawBoundingBoxes FFT3D IFFT3D QuantizeAndDequantize QuantizeAndDequantizeV2 QuantizeAndDequantizeV3
  QuantizeAndDequantizeV4 TridiagonalSolve XlaDynamicUpdateSlice XlaSharding XlaSort _MklRelu: same shape
AdjustContrastv2: same shape, per image
BatchMatrixInverse Cholesky FFT2D IFFT2D MatrixExponential MatrixInverse: same shape, per matrix
AdjustHue AdjustSaturation FFT HSVToRGB IFFT RGBToHSV: same shape, per vector
Angle BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 ComplexAbs Conj
  CopyHost Dawsn DebugIdentity Digamma Erfinv Expint FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel
  FresnelCos FresnelSin Imag Ndtri PopulationCount Real: same shape, per element
Ceil IsFinite IsInf IsNan Sign: step
ClipByValue: same shape, stacks, limit, exact when widened, scalars 1 2, per element
Elu: curve, activation, flops 3
Erf: gelu curve, flops 6
Erfc: gelu curve
Exp: curve, row part, softmax part, keeps one value
Floor: step, passes values, keeps one value
Inv Reciprocal Rsqrt Sqrt: curve, row part, keeps one value
Invert: unary, exact, wraps
LeakyRelu: curve, activation
Lgamma Spence: same shape, stacks, per element
Log Log1p: curve, keeps one value
LogicalNot: unary, exact, hands on a condition, keeps one value
Neg: linear, unary, exact, gelu part, row part, keeps one value
OnesLike ZerosLike: unary, exact, makes
Relu: exact, activation, passes values
Relu6: exact, exact when widened, activation
Rint Round: step, passes values
Selu: curve, flops 3
Sigmoid Tanh: activation, gelu curve, flops 4
Softplus: curve, flops 4
Square: curve, wraps, gelu part, row part, keeps one value

# Functions of two elements
Add: add, wraps, epilogue step, gelu part, row part, not negative, keeps two values
AddV2: add, one type, wraps, gelu part, row part, not negative, keeps two values
ApproximateEqual Complex Igamma IgammaGradA Igammac LeftShift NextAfter Polygamma RightShift Zeta _FusedBinary: broadcasts
Atan2 MulNoNan Xdivy Xlogy: arithmetic
BitwiseAnd BitwiseOr BitwiseXor: binary, exact, commutative
Div: broadcasts, stacks, divide, exact when widened, gelu part, row part, keeps two values, neutral 1
DivNoNan: arithmetic, keeps two values
Equal: comparison, commutative
FloorDiv FloorMod Mod: broadcasts, stacks, integer division, exact when widened, keeps two values
Greater: comparison, ordered, lower bound
GreaterEqual: comparison, ordered, lower bound, mask test
Less LessEqual: comparison, ordered
LogicalAnd LogicalOr: logic
Maximum: binary, limit, ordered, not negative, keeps two values, any slot
Minimum: binary, limit, ordered, keeps two values
Mul: arithmetic, commutative, multiply, one type, gelu part, row part, not negative, keeps two values, neutral 1
NotEqual: comparison, commutative, mask test
Pow: arithmetic, gelu part, keeps two values, flops 6
RealDiv: arithmetic, divide, gelu part, row part, keeps two values, neutral 1
SquaredDifference: arithmetic, commutative, row part, flops 2
Sub: linear, arithmetic, one type, wraps, gelu part, row part, keeps two values, ragged, neutral 0
TruncateDiv TruncateMod: broadcasts, integer division, exact when widened
Xlog1py: broadcasts, rounds smoothly

# Gradients of functions of one element
EluGrad InvGrad LeakyReluGrad ReciprocalGrad RsqrtGrad SeluGrad SoftplusGrad SoftsignGrad SqrtGrad: operands agree
Relu6Grad ReluGrad: operands agree, exact when widened
SigmoidGrad TanhGrad: operands agree, flops 3

# Products, convolutions, norms
AvgPool AvgPool3D MaxPool MaxPool3D: pool, runs alone, per item
BatchMatMul BatchMatMulV2: batch matmul
BatchMatMulV3: product
BiasAdd: one type, wraps, bias, epilogue step
BiasAddV1: bias
BlockLSTM BlockLSTMV2 Conv Conv2DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInputV2 CudnnRNN CudnnRNNV2 CudnnRNNV3 Einsum
  SparseMatMul XlaEinsum _FusedBatchMatMulV2 _FusedConv3D: tensor cores
Conv2D: image convolution, conv2d
Conv2DBackpropInput: runs alone, tensor cores
Conv3D: convolution, tensor cores
DepthwiseConv2dNative: image convolution
FusedBatchNorm: old batch norm, epilogue step, vision
FusedBatchNormGrad FusedBatchNormGradV3: first port counts, flops 9
FusedBatchNormGradV2 _FusedBatchNormEx _FusedBatchNormGradEx: first port counts
FusedBatchNormV2: old batch norm
FusedBatchNormV3: batch norm, vision
_FusedConv2D: conv2d
GRUBlockCell LSTMBlockCell: single cell, tensor cores
_LayerNorm: row kernel
LogSoftmax Softmax: softmax
LRN: same shape, per vector
LRNGrad: same shape, flops 30
MatMul _FusedMatMul: matmul, weights 1
SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits: first port counts, flops 7
LogMatrixDeterminant Lu MatrixDeterminant MatrixSolve MatrixTriangularSolve Qr SelfAdjointEigV2 Svd: per matrix
IRFFT RFFT: per vector

# Reductions, segments, scans
UnsortedSegmentProd: wraps, reduces
AccumulateNV2: wraps, reduces, per element
AddN: linear, masks elementwise, rounds smoothly, commutative, wraps, join, reduces, per element
All Any: exact, reduction, row kernel
ArgMax ArgMin: ordered, reduces
TopK TopKV2: ordered, reduces, per vector
BiasAddGrad DenseBincount EuclideanNorm HistogramFixedWidth InTopK InTopKV2 L2Loss: reduces
NthElement: reduces, per vector
Bincount: ragged, reduces
Cumprod Cumsum: same shape, wraps, flops 2
CumulativeLogsumexp: same shape
Max: exact, ordered, row start, softmax part, needs elements
Mean: linear, row start, combines, needs elements
Min: exact, ordered, reduction, row kernel, needs elements
Prod: wraps, not negative, reduction
SegmentMax SegmentMin: dynamic, exact when widened, reduces, segments 1
SegmentMean: dynamic, dense segment, segments 1
SegmentProd: wraps, dense segment, segments 1
SegmentSum: dynamic, wraps, dense segment, segments 1
Sum: linear, wraps, row reduction, combines, softmax part, not negative
UnsortedSegmentMax UnsortedSegmentMin: ordered, reduces, ids 1, bound 2
UnsortedSegmentSum: wraps, reduces, ids 1, bound 2

# Lookups, sparse and ragged tensors
Gather: gather, reads by reference, table 0, ids 1, weights 0
GatherNd: passes values, gather nd, table 0, ids 1
GatherV2: one type, gather, reads by reference, table 0, ids 1, weights 0
KvResourceGather KvResourceGatherV1: reads rows behind a handle
RaggedRange RowPartitionFromSplits: ragged
RaggedTensorToTensor: passes values, values_in 1
ResourceGather: gather, reads rows behind a handle, reads by handle, table 0, ids 1, weights 0
ResourceGatherNd: gather nd, reads rows behind a handle, reads by handle, table 0, ids 1
SparseFillEmptyRows: dynamic, passes values, values_in 1, values_out 1
SparseReorder: passes values, values_in 1, values_out 1
SparseSegmentMean SparseSegmentSqrtN SparseSegmentSum: sparse segment, table 0, ids 1, segments 2
SparseSegmentMeanWithNumSegments SparseSegmentSqrtNWithNumSegments SparseSegmentSumWithNumSegments: table 0, ids 1, segments 2
SparseToDense: wraps, passes values, values_in 2
Unique: dense if its input is, wraps, picks values, unique, passes values, reduces
UniqueV2: dynamic, wraps, passes values, reduces
UniqueWithCounts: wraps, unique, reduces
UniqueWithCountsV2: dynamic, wraps

# Views, and what moves elements
InplaceAdd InplaceSub InplaceUpdate MatrixSetDiagV2 TensorStridedSliceUpdate: same shape
BatchMatrixBandPart: same shape, per matrix
BatchToSpaceND ConjugateTranspose MirrorPadGrad ParallelConcat SpaceToBatchND StridedSliceGrad: moves
DepthToSpace ExtractImagePatches SpaceToDepth: moves, per item
MatrixDiag MatrixDiagV2 MatrixDiagV3: moves, per vector
BroadcastTo: view, repeat
Bucketize: same shape, exact when widened, moves, per element
Cast: linear, same shape, stacks, masks elementwise, keeps coordinates, reads weights, keeps one value, moves
Concat: moves, concatenates, axis 0
ConcatV2: parts, concatenates, not negative, axis -1
MatrixSetDiag MatrixSetDiagV3 ReverseSequence Roll: same shape, moves
Copy DeepCopy: same shape, moves, per element
DiagPart: cuts
ResizeNearestNeighbor: cuts, per item
MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3: cuts, per matrix
DynamicPartition: dynamic, all ports, cuts
DynamicStitch: wraps, stitch
ExpandDims Reshape Squeeze: reshape
InvertPermutation: same shape, free
MatrixBandPart: same shape, wraps, moves, per matrix
MirrorPad: unchanged by shape, moves
Pack: parts, not negative
Pad PadV2: pad
ParallelDynamicStitch: stitch
ResizeBicubic: flops 40, per item
ResizeBilinearGrad: flops 8
ResizeBilinear: flops 8, per item
Reverse: same shape, picks values, moves
ReverseV2: same shape, picks values, passes values, moves
ScatterNd: wraps
ScatterNdNonAliasingAdd TensorScatterAdd TensorScatterSub TensorScatterUpdate: same shape, wraps
Select: select
SelectV2: stacks, select
Slice: view, unchanged by shape, keeps coordinates
Split: view, all ports, values_in 1
SplitV Unpack: view, all ports
StridedSlice Transpose: view, keeps coordinates
TensorScatterMax TensorScatterMin: same shape, ordered
Tile: repeat, keeps coordinates, moves
Where: dynamic, moves

# Lists, arrays and stacks
EmptyTensorList Stack StackPopV2 StackPushV2 StackV2 TensorArrayCloseV3 TensorArrayGradV3 TensorArrayScatterV3 TensorArrayV3
  TensorArrayWriteV3 TensorListGetItem TensorListPopBack TensorListReserve TensorListResize TensorListSetItem: free
TensorArrayConcat TensorArrayConcatV2 TensorArrayGather TensorArrayGatherV2 TensorArrayPack TensorArrayRead TensorArrayReadV2
  TensorArraySize TensorArraySizeV2: array value
TensorArrayConcatV3 TensorArrayGatherV3: reads state, array value, moves
TensorArrayReadV3: reads state, array value, free
TensorArraySizeV3: static, reads state, array value
TensorArrayV2FromTensor: enters loops
TensorListConcatV2 TensorListGather TensorListPushBack TensorListStack: moves
TensorListElementShape TensorListLength: static
TensorListFromTensor: enters loops, free

# Strings, files, summaries
AsString RegexReplace StaticRegexReplace StringLower StringStrip StringToNumber StringUpper UnicodeTranscode: same shape, passes values,
  per element
AudioSummary AudioSummaryV2 HistogramSummary ImageSummary MergeSummary TensorSummary TensorSummaryV2: summary
DecodeAndCropJpeg DecodeImage DecodeJpeg DecodePng: decodes images
DecodeBase64 EncodeBase64 RegexFullMatch StaticRegexFullMatch StringLength StringToHashBucket StringToHashBucketFast
  StringToHashBucketStrong Substr UnicodeScript: same shape, per element
DecodeBmp DecodeGif DecodeProtoV2 ParseSequenceExample ParseSingleSequenceExample: needs a file
DecodeCSV DecodeRaw: decodes
MergeV2Checkpoints Restore RestoreSlice RestoreV2 Save SaveSlices SaveV2 ShardedFilename: checkpoint
ParseExample ParseExampleV2 ParseSequenceExampleV2 ParseSingleExample: parses examples
ScalarSummary: summary, scalars 1
StringFormat: free
StringJoin: hands on file names, per element
StringSplit StringSplitV2: splits strings, values_out 1

# Training: what changes variables
ApplyAdadelta ResourceApplyAdadelta ResourceSparseApplyAdadelta SparseApplyAdadelta: writes 0 1 2, flops 10
ApplyAdagrad ApplyAdagradV2 ResourceApplyAdagrad ResourceApplyAdagradV2 ResourceSparseApplyAdagrad ResourceSparseApplyAdagradV2
  SparseApplyAdagrad SparseApplyAdagradV2: writes 0 1, flops 5
ApplyAdagradDA ResourceApplyAdagradDA ResourceSparseApplyAdagradDA SparseApplyAdagradDA: writes 0 1 2, flops 8
ApplyAdaMax ApplyAdam ResourceApplyAdaMax ResourceApplyAdam: writes 0 1 2, flops 10
ApplyAddSign ApplyPowerSign ResourceApplyAddSign ResourceApplyPowerSign: writes 0 1, flops 8
ApplyCenteredRMSProp ResourceApplyCenteredRMSProp ResourceSparseApplyCenteredRMSProp SparseApplyCenteredRMSProp: writes 0 1 2 3, flops 10
ApplyFtrl ApplyFtrlV2 ResourceApplyFtrl ResourceApplyFtrlV2 ResourceSparseApplyFtrl ResourceSparseApplyFtrlV2 SparseApplyFtrl
  SparseApplyFtrlV2: writes 0 1 2, flops 12
ApplyGradientDescent ApplyProximalGradientDescent ResourceApplyGradientDescent ResourceApplyProximalGradientDescent
  ResourceSparseApplyProximalGradientDescent SparseApplyProximalGradientDescent: writes 0, flops 2
ApplyMomentum ResourceApplyKerasMomentum ResourceApplyMomentum ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum
  SparseApplyMomentum: writes 0 1, flops 4
ApplyProximalAdagrad ResourceApplyProximalAdagrad ResourceSparseApplyProximalAdagrad SparseApplyProximalAdagrad: writes 0 1, flops 8
ApplyRMSProp ResourceApplyRMSProp ResourceSparseApplyRMSProp SparseApplyRMSProp: writes 0 1 2, flops 8
AssignAdd AssignAddVariableOp AssignSub AssignSubVariableOp: writes 0
CountUpTo ResourceCountUpTo ResourceStridedSliceAssign RngReadAndSkip RngSkip StridedSliceAssign: writes 0
ResourceApplyAdamWithAmsgrad: writes 0 1 2 3, flops 12
ResourceScatterAdd ResourceScatterSub ScatterAdd ScatterSub: writes 0, adds rows
ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterMul ResourceScatterUpdate ScatterDiv ScatterMax ScatterMin
  ScatterMul ScatterUpdate: writes 0, changes rows
ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin ResourceScatterNdSub ResourceScatterNdUpdate ScatterNdAdd
  ScatterNdMax ScatterNdMin ScatterNdSub ScatterNdUpdate: writes 0

# Shapes, and what only writes
BroadcastArgs ConcatOffset: free
BroadcastGradientArgs: asks for shapes, left over
Empty: makes
Fill: makes, scalars 1
LinSpace: makes, scalars 0 1 2
OneHot: makes, ids 0, bound 1, scalars 1 2 3
Range: not negative, makes, scalars 0 1 2
Rank ShapeN Size: shape of
Shape: shape of, reads by reference

# Others
Cross: wraps, per vector
LowerBound UpperBound: ordered
"""


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of an op.

    Attributes:
        words: Its traits.
        flops: Operations per element of the output (or of the largest input, where there is no output).
        table: Input slot of the table that it looks up in.
        ids: Input slot of what indexes that table, or a range.
        bound: Input slot of the constant that bounds those, where no table does.
        segments: Input slot of segment ids, which must not decrease.
        weights: Input slot of constant weights, of which branches have one each.
        axis: Input slot of the axis that it writes its inputs along, from the back where negative.
        neutral: A second operand that changes no bit of the first one: x - 0 is x for both zeros, x + 0 is not.
        values_in: Input slot of the values that it passes on.
        values_out: Output port where they go out.
        scalars: Input slots that take nothing but one value.
        writes: Input slots of the variables that it changes.
    """

    words: frozenset[str] = frozenset()
    flops: int = 1
    table: int | None = None
    ids: int | None = None
    bound: int | None = None
    segments: int | None = None
    weights: int | None = None
    neutral: int | None = None
    axis: int | None = None
    values_in: int = 0
    values_out: int = 0
    scalars: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """(what stands before the colon, what behind it) of each entry; one goes on in lines that begin with a space."""
    joined = "\n".join(line for line in text.splitlines() if line and not line.startswith("#")).replace("\n ", "")
    for entry in joined.splitlines():
        head, colon, tail = entry.partition(": ")
        if not colon:
            raise ValueError(f"no colon in: {entry}")
        yield head, tail


def _implications() -> dict[str, frozenset[str]]:
    """Per word, that and all words that go with it. A word stands behind those that it implies, or before: order does not matter."""
    direct = {}
    for head, _ in _entries(TRAITS):
        word, _, others = head.partition(" (")
        direct[word] = others.removesuffix(")").split(", ") if others else []
    found = {}
    for word in direct:
        waiting, seen = [word], {word}
        while waiting:
            following = [other for other in direct[waiting.pop()] if other not in seen]
            seen.update(following)
            waiting += following
        found[word] = frozenset(seen)
    return found


_IMPLIED = _implications()


def _read() -> dict[str, Traits]:
    table: dict[str, Traits] = {}
    for ops, described in _entries(ROWS):
        words: set[str] = set()
        fields: dict[str, int | tuple[int, ...]] = {}
        for item in described.split(", "):
            if item in _IMPLIED:
                words |= _IMPLIED[item]
            else:
                name, *numbers = item.split()
                fields[name] = tuple(map(int, numbers)) if name in ("scalars", "writes") else int(*numbers)
        row = Traits(frozenset(words), **fields)  # type: ignore[arg-type]
        for op in ops.split():
            if op in table:
                raise ValueError(f"{op} has two rows")
            table[op] = row
    return table


TABLE = _read()
_NONE = Traits()


def traits(op: str) -> Traits:
    """What is known of an op; the defaults for one without a row."""
    return TABLE.get(op, _NONE)


def _collect() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {word: set() for word in _IMPLIED}
    for op, row in TABLE.items():
        for word in row.words:
            found[word].add(op)
    return {word: frozenset(ops) for word, ops in found.items()}


_WITH = _collect()


def ops_with(*words: str) -> frozenset[str]:
    """Every op that has all of these traits.

    Raises:
        KeyError: There is no such trait.
    """
    first, *others = (_WITH[word] for word in words)
    return first.intersection(*others)


ADD = ops_with("add")
BATCH_MATMULS = ops_with("batch matmul")
BATCH_NORMS = ops_with("batch norm")
BIASES = ops_with("bias")
CALLS = ops_with("call")
CASE = ops_with("case")
CONDS = ops_with("if") | ops_with("case")
CONSTANTS = ops_with("constant")
CONV2D = ops_with("conv2d")
CONVOLUTIONS = ops_with("convolution")
DRAWN_ON_DEVICE = ops_with("draws on device")
DRAWS = ops_with("draws")
ENTER = ops_with("enter")
EPILOGUE_STEPS = ops_with("epilogue step")
EXIT = ops_with("exit")
FREE_OF_EFFECTS = (
    ops_with("no effect") | ops_with("reads state") | ops_with("repeatable") | ops_with("handle") | ops_with("variable")
)
"""Stateful ops that nobody misses when nobody uses what they give."""
GATHERS = ops_with("gather")
IF = ops_with("if")
IMAGE_CONVOLUTIONS = ops_with("image convolution")
JOINS = ops_with("join")
LOOPS = ops_with("while")
MATMULS = ops_with("matmul")
MERGE = ops_with("merge")
NEXT = ops_with("next")
PARSERS = ops_with("parses examples")
PADS = ops_with("pad")
PLACEHOLDERS = ops_with("placeholder")
RESHAPES = ops_with("reshape")
SELECT = ops_with("select")
SPARSE_SEGMENTS = ops_with("sparse segment")
SWITCH = ops_with("switch") | ops_with("switch n")
VARIABLES = ops_with("variable")
VIEWS = ops_with("view")
