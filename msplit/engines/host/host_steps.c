/* Steps of a host part in one call: what `native.py` lists of them, each as the function of its op in NumPy, which has the same values.
   `host_ops.c` includes this.

   A step that meets what it is not made for, or what TensorFlow refuses, gives 0. All of its part runs in NumPy then, which tells the
   reason; so nothing here says more than that. Values lie one element behind the other, in C order. No step writes into what it reads,
   and so several may have the same memory. */

#include <stdlib.h>

enum { BOOL, I32, I64, F32, F64, TEXT, OBJECTS };
enum { AXES = 6 };
static const int64_t WIDTH[] = {1, 4, 8, 4, 8, 16, 8};

typedef struct { uint8_t *data; int64_t type, rank, size, shape[AXES]; } Value;

/* Memory of a call, given back as a whole. */
typedef struct Chunk { struct Chunk *before; int64_t used, size, unused; uint8_t data[]; } Chunk;
typedef struct { Chunk *chunk; } Run;

typedef const Value *const *In;
typedef Value *const *Out;

static void *allocate(Run *run, int64_t size) {
  if (size < 0 || size > (int64_t)1 << 40) return 0;
  size = (size + 31) & ~(int64_t)15;
  Chunk *chunk = run->chunk;
  if (!chunk || chunk->size - chunk->used < size) {
    int64_t room = chunk ? 2 * chunk->size : 1 << 16;
    if (room > 1 << 26) room = 1 << 26;
    if (room < size) room = size;
    if (!(chunk = malloc(sizeof *chunk + room))) return 0;
    chunk->before = run->chunk, chunk->used = 0, chunk->size = room;
    run->chunk = chunk;
  }
  void *made = chunk->data + chunk->used;
  chunk->used += size;
  return made;
}

static void *allocate_zeros(Run *run, int64_t size) {
  void *made = allocate(run, size);
  return made ? memset(made, 0, size) : 0;
}

/* Memory for an output; 0 where there is none, or where it has too many axes. */
static void *make(Run *run, Value *out, int64_t type, int64_t rank, const int64_t *shape) {
  if (rank < 0 || rank > AXES) return 0;
  int64_t size = 1;
  for (int64_t axis = 0; axis < rank; axis++) {
    if (shape[axis] < 0 || __builtin_mul_overflow(size, shape[axis], &size)) return 0;
    out->shape[axis] = shape[axis];
  }
  if (size > (int64_t)1 << 28) return 0;
  out->type = type, out->rank = rank, out->size = size;
  return out->data = allocate(run, size * WIDTH[type]);
}

/* As `make`, of sizes that a few bytes of a request can ask for, even of nothing: as `check_size` in Python. */
static void *make_asked(Run *run, Value *out, int64_t type, int64_t rank, const int64_t *shape) {
  int64_t most = 1;
  for (int64_t axis = 0; axis < rank; axis++)
    if (shape[axis] < 0 || (shape[axis] && (__builtin_mul_overflow(most, shape[axis], &most) || most > 1 << 26))) return 0;
  return make(run, out, type, rank, shape);
}

static void *make_vector(Run *run, Value *out, int64_t type, int64_t size) { return make(run, out, type, 1, &size); }

static void *make_like(Run *run, Value *out, int64_t type, const Value *in) { return make(run, out, type, in->rank, in->shape); }

/* A whole number, of the types that sizes and indices have. */
static int64_t whole(const Value *in, int64_t i) {
  return in->type == I64 ? ((const int64_t *)in->data)[i] : in->type == I32 ? ((const int32_t *)in->data)[i] : in->data[i];
}

static int is_whole(const Value *in) { return in->type == I32 || in->type == I64; }

static void put(Value *out, int64_t i, int64_t value) {
  if (out->type == I64) ((int64_t *)out->data)[i] = value;
  else ((int32_t *)out->data)[i] = value;
}

/* One number that is an axis: below `count`, or -1 where it is none. */
static int64_t axis_of(const Value *in, int64_t count) {
  if (in->size != 1 || !is_whole(in)) return -1;
  int64_t axis = whole(in, 0);
  if (axis < 0) axis += count;
  return axis < 0 || axis >= count ? -1 : axis;
}

static void copy_one(uint8_t *to, const uint8_t *from, int64_t width) {
  switch (width) {
    case 1: *to = *from; break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    default: memcpy(to, from, 16);
  }
}

/* One element again and again. */
static void repeat(uint8_t *to, const uint8_t *from, int64_t width, int64_t count) {
  for (int64_t i = 0; i < count; i++) copy_one(to + i * width, from, width);
}

/* Elements that lie `steps` bytes apart along each axis, in C order. */
static void copy_view(uint8_t *to, const uint8_t *from, int64_t width, int64_t rank, const int64_t *sizes, const int64_t *steps) {
  int64_t index[2 * AXES] = {0}, size[2 * AXES], step[2 * AXES], axes = 0;
  for (int64_t axis = 0; axis < rank; axis++) {
    if (!sizes[axis]) return;
    if (sizes[axis] > 1) size[axes] = sizes[axis], step[axes++] = steps[axis];
  }
  int64_t inner = axes ? size[axes - 1] : 1, apart = axes ? step[axes - 1] : width;
  for (;;) {
    if (apart == width) memcpy(to, from, inner * width);
    else
      for (int64_t i = 0; i < inner; i++) copy_one(to + i * width, from + i * apart, width);
    to += inner * width;
    int64_t axis = axes - 2;
    for (; axis >= 0; axis--) {
      from += step[axis];
      if (++index[axis] < size[axis]) break;
      from -= step[axis] * size[axis];
      index[axis] = 0;
    }
    if (axis < 0) return;
  }
}

static void steps_of(const Value *in, int64_t *steps) {
  int64_t step = WIDTH[in->type];
  for (int64_t axis = in->rank - 1; axis >= 0; axis--) steps[axis] = step, step *= in->shape[axis];
}

/* Shapes */

static int identity(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return *out[0] = *in[0], 1; }

static int nothing(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return 1; }

static int assertion(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  for (int64_t i = 0; i < in[0]->size; i++)
    if (!in[0]->data[i]) return 0;
  return in[0]->type == BOOL;
}

/* attrs: which inputs behind the condition the outputs are, where it holds. */
static int guard(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  if (in[0]->type != BOOL || in[0]->rank || !in[0]->data[0]) return 0;
  for (int64_t i = 0; i < attrs[0]; i++) {
    if (1 + attrs[1 + i] >= count) return 0;
    *out[i] = *in[1 + attrs[1 + i]];
  }
  return 1;
}

static int shape(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  if (!make_vector(run, out[0], attrs[0], in[0]->rank)) return 0;
  for (int64_t axis = 0; axis < in[0]->rank; axis++) put(out[0], axis, in[0]->shape[axis]);
  return 1;
}

static int number(Run *run, Value *out, int64_t type, int64_t value) {
  if (!make(run, out, type, 0, 0)) return 0;
  put(out, 0, value);
  return 1;
}

static int size_of(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return number(run, out[0], attrs[0], in[0]->size); }

static int rank_of(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return number(run, out[0], I32, in[0]->rank); }

static int reshape(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t open = -1, rest = 1, rank = in[1]->size;
  if (!is_whole(in[1]) || in[1]->rank != 1 || rank > AXES) return 0;
  *out[0] = *in[0];
  out[0]->rank = rank;
  for (int64_t axis = 0; axis < rank; axis++) {
    int64_t size = out[0]->shape[axis] = whole(in[1], axis);
    if (size == -1 && open < 0) open = axis;
    else if (size < 0 || __builtin_mul_overflow(rest, size, &rest)) return 0;
  }
  if (open >= 0) {
    if (!rest || in[0]->size % rest) return 0;
    out[0]->shape[open] = in[0]->size / rest;
    return 1;
  }
  return rest == in[0]->size;
}

static int expand_dims(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t axis = axis_of(in[1], in[0]->rank + 1);
  if (axis < 0 || in[0]->rank == AXES) return 0;
  *out[0] = *in[0];
  for (int64_t i = out[0]->rank++; i > axis; i--) out[0]->shape[i] = out[0]->shape[i - 1];
  out[0]->shape[axis] = 1;
  return 1;
}

static int squeeze(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int gone[AXES] = {0};
  int64_t rank = in[0]->rank, left = 0;
  for (int64_t i = 0; i < attrs[0]; i++) {
    int64_t axis = attrs[1 + i] < 0 ? attrs[1 + i] + rank : attrs[1 + i];
    if (axis < 0 || axis >= rank || in[0]->shape[axis] != 1 || gone[axis]) return 0;
    gone[axis] = 1;
  }
  *out[0] = *in[0];
  for (int64_t axis = 0; axis < rank; axis++)
    if (attrs[0] ? !gone[axis] : in[0]->shape[axis] != 1) out[0]->shape[left++] = in[0]->shape[axis];
  out[0]->rank = left;
  return 1;
}

/* Pieces and copies */

static int gather(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const Value *params = in[0], *indices = in[1];
  int64_t along = axis_of(in[2], params->rank), shape[2 * AXES], rank = 0, outer = 1, inner = WIDTH[params->type];
  if (along < 0 || !is_whole(indices)) return 0;
  for (int64_t axis = 0; axis < along; axis++) outer *= shape[rank++] = params->shape[axis];
  for (int64_t axis = 0; axis < indices->rank; axis++) shape[rank++] = indices->shape[axis];
  for (int64_t axis = along + 1; axis < params->rank; axis++) inner *= shape[rank++] = params->shape[axis];
  uint8_t *to = make(run, out[0], params->type, rank, shape);
  if (!to) return 0;
  for (int64_t i = 0; i < indices->size; i++)
    if (whole(indices, i) < 0 || whole(indices, i) >= params->shape[along]) return 0;
  if (!out[0]->size) return 1;
  int small = inner == 4 || inner == 8 || inner == 16;
  for (int64_t o = 0; o < outer; o++)
    for (int64_t i = 0; i < indices->size; i++, to += inner) {
      const uint8_t *from = params->data + (o * params->shape[along] + whole(indices, i)) * inner;
      if (small) copy_one(to, from, inner);
      else memcpy(to, from, inner);
    }
  return 1;
}

static int concat(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rank = in[0]->rank, along = axis_of(in[--count], rank), shape[AXES], outer = 1;
  if (along < 0) return 0;
  memcpy(shape, in[0]->shape, sizeof shape);
  for (int64_t i = 1; i < count; i++) {
    if (in[i]->rank != rank || in[i]->type != in[0]->type) return 0;
    for (int64_t axis = 0; axis < rank; axis++)
      if (axis != along && in[i]->shape[axis] != shape[axis]) return 0;
    if (__builtin_add_overflow(shape[along], in[i]->shape[along], &shape[along])) return 0;
  }
  uint8_t *to = make(run, out[0], in[0]->type, rank, shape);
  if (!to) return 0;
  if (!out[0]->size) return 1;
  for (int64_t axis = 0; axis < along; axis++) outer *= shape[axis];
  for (int64_t o = 0; o < outer; o++)
    for (int64_t i = 0; i < count; i++) {
      int64_t part = in[i]->size / outer * WIDTH[in[i]->type];
      memcpy(to, in[i]->data + o * part, part);
      to += part;
    }
  return 1;
}

static int pack(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rank = in[0]->rank, along = attrs[0] < 0 ? attrs[0] + rank + 1 : attrs[0], shape[AXES], outer = 1;
  if (along < 0 || along > rank || rank == AXES) return 0;
  for (int64_t i = 1; i < count; i++)
    if (in[i]->type != in[0]->type || in[i]->rank != rank || memcmp(in[i]->shape, in[0]->shape, rank * 8)) return 0;
  memcpy(shape, in[0]->shape, along * 8);
  memcpy(shape + along + 1, in[0]->shape + along, (rank - along) * 8);
  shape[along] = count;
  uint8_t *to = make(run, out[0], in[0]->type, rank + 1, shape);
  if (!to) return 0;
  if (!out[0]->size) return 1;
  for (int64_t axis = 0; axis < along; axis++) outer *= shape[axis];
  int64_t part = outer ? in[0]->size / outer * WIDTH[in[0]->type] : 0;
  for (int64_t o = 0; o < outer; o++)
    for (int64_t i = 0; i < count; i++, to += part) memcpy(to, in[i]->data + o * part, part);
  return 1;
}

static int tile(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rank = in[0]->rank, shape[AXES], own[AXES], sizes[2 * AXES], steps[2 * AXES];
  if (!is_whole(in[1]) || in[1]->rank != 1 || in[1]->size != rank) return 0;
  steps_of(in[0], own);
  for (int64_t axis = 0; axis < rank; axis++) {
    int64_t times = sizes[2 * axis] = whole(in[1], axis);
    if (times < 0 || __builtin_mul_overflow(times, in[0]->shape[axis], &shape[axis])) return 0;
    sizes[2 * axis + 1] = in[0]->shape[axis], steps[2 * axis] = 0, steps[2 * axis + 1] = own[axis];
  }
  if (!make(run, out[0], in[0]->type, rank, shape)) return 0;
  copy_view(out[0]->data, in[0]->data, WIDTH[in[0]->type], 2 * rank, sizes, steps);
  return 1;
}

static int fill(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t shape[AXES];
  if (!is_whole(in[0]) || in[0]->rank != 1 || in[0]->size > AXES || in[1]->rank) return 0;
  for (int64_t axis = 0; axis < in[0]->size; axis++) shape[axis] = whole(in[0], axis);
  if (!make_asked(run, out[0], in[1]->type, in[0]->size, shape)) return 0;
  repeat(out[0]->data, in[1]->data, WIDTH[in[1]->type], out[0]->size);
  return 1;
}

static int slice(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rank = in[0]->rank, shape[AXES], steps[AXES];
  const uint8_t *from = in[0]->data;
  if (!is_whole(in[1]) || in[1]->size != rank || in[2]->size != rank) return 0;
  steps_of(in[0], steps);
  for (int64_t axis = 0; axis < rank; axis++) {
    int64_t start = whole(in[1], axis), size = whole(in[2], axis), most = in[0]->shape[axis];
    if (start < 0 || start > most) return 0;
    shape[axis] = size == -1 ? most - start : size;
    if (shape[axis] < 0 || shape[axis] > most - start) return 0;
    from += start * steps[axis];
  }
  if (!make(run, out[0], in[0]->type, rank, shape)) return 0;
  copy_view(out[0]->data, from, WIDTH[in[0]->type], rank, shape, steps);
  return 1;
}

/* attrs: the masks of begin, end, axes that go, the place of all axes that are not named, and new axes. */
static int strided_slice(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rank = in[0]->rank, sizes[AXES], steps[AXES], shape[2 * AXES], left = 0, axis = 0, named = 0, given = in[1]->size;
  const uint8_t *from = in[0]->data;
  if (!is_whole(in[1]) || in[1]->rank != 1 || given > 2 * AXES || in[2]->size != given || in[3]->size != given) return 0;
  for (int64_t i = 0; i < given; i++) named += !((attrs[3] | attrs[4]) >> i & 1);
  if (named > rank) return 0;
  steps_of(in[0], steps);
  for (int64_t i = 0; i < given; i++) {
    int64_t bit = (int64_t)1 << i;
    if (attrs[3] & bit) {
      for (int64_t rest = rank - named; rest > 0; rest--, axis++) shape[left++] = sizes[axis] = in[0]->shape[axis];
      named = rank;
      continue;
    }
    if (left >= AXES) return 0;
    if (attrs[4] & bit) {
      shape[left++] = 1;
      continue;
    }
    int64_t most = in[0]->shape[axis], start = whole(in[1], i), stop = whole(in[2], i), step = whole(in[3], i);
    if (attrs[2] & bit) {
      if (start < -most || start >= most) return 0;
      from += (start < 0 ? start + most : start) * steps[axis];
      sizes[axis++] = 1;
      continue;
    }
    if (!step) return 0;
    step = step > most ? most + 1 : step < -most ? -most - 1 : step;
    int64_t first = step > 0 ? 0 : -1, last = step > 0 ? most : most - 1;
    start = start < 0 ? (start < -most ? first : start + most) : start > last ? last : start;
    stop = stop < 0 ? (stop < -most ? first : stop + most) : stop > last ? last : stop;
    if (attrs[0] & bit) start = step > 0 ? 0 : most - 1;
    if (attrs[1] & bit) stop = step > 0 ? most : -1;
    int64_t size = step > 0 ? (start < stop ? (stop - start - 1) / step + 1 : 0) : stop < start ? (start - stop - 1) / -step + 1 : 0;
    if (size) from += start * steps[axis];
    steps[axis] *= step;
    sizes[axis++] = shape[left++] = size;
  }
  for (; axis < rank; axis++) shape[left++] = sizes[axis] = in[0]->shape[axis];
  if (!make(run, out[0], in[0]->type, left, shape)) return 0;
  copy_view(out[0]->data, from, WIDTH[in[0]->type], rank, sizes, steps);
  return 1;
}

static int broadcast_to(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rank = in[1]->size, own[AXES], shape[AXES], steps[AXES], before = rank - in[0]->rank;
  if (!is_whole(in[1]) || in[1]->rank != 1 || rank > AXES || before < 0) return 0;
  steps_of(in[0], own);
  for (int64_t axis = 0; axis < rank; axis++) {
    int64_t size = axis < before ? 1 : in[0]->shape[axis - before];
    shape[axis] = whole(in[1], axis);
    if (shape[axis] < 0 || (size != 1 && size != shape[axis])) return 0;
    steps[axis] = size == 1 ? 0 : own[axis - before];
  }
  if (!make_asked(run, out[0], in[0]->type, rank, shape)) return 0;
  copy_view(out[0]->data, in[0]->data, WIDTH[in[0]->type], rank, shape, steps);
  return 1;
}

static int constant_like(Run *run, Value *out, const Value *in, int one) {
  if (!make_like(run, out, in->type, in) || in->type > F64) return 0;
  memset(out->data, 0, out->size * WIDTH[out->type]);
  for (int64_t i = 0; one && i < out->size; i++)
    switch (out->type) {
      case BOOL: out->data[i] = 1; break;
      case F32: ((float *)out->data)[i] = 1; break;
      case F64: ((double *)out->data)[i] = 1; break;
      default: put(out, i, 1);
    }
  return 1;
}

static int zeros_like(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return constant_like(run, out[0], in[0], 0); }

static int ones_like(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return constant_like(run, out[0], in[0], 1); }

static int one_hot(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t shape[AXES], rank = in[0]->rank, width = WIDTH[in[2]->type];
  if (!is_whole(in[0]) || !is_whole(in[1]) || rank == AXES || in[1]->size != 1 || in[2]->rank || in[3]->rank) return 0;
  int64_t depth = whole(in[1], 0);
  memcpy(shape, in[0]->shape, rank * 8);
  shape[rank] = depth;
  if (!make(run, out[0], in[2]->type, rank + 1, shape)) return 0;
  repeat(out[0]->data, in[3]->data, width, out[0]->size);
  for (int64_t i = 0; i < in[0]->size; i++) {
    int64_t index = whole(in[0], i);
    if (index >= 0 && index < depth) copy_one(out[0]->data + (i * depth + index) * width, in[2]->data, width);
  }
  return 1;
}

/* Arithmetic */

enum { ADD, SUBTRACT, MULTIPLY, DIVIDE, DIVIDE_NO_NAN, FLOOR_DIVIDE, FLOOR_MOD, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, EQUAL, NOT_EQUAL, MAXIMUM, MINIMUM, AND, OR, SELECT };

#define LOOP(T, R, E)                                                            \
  for (int64_t i = 0; i < n; i++) {                                              \
    T a = *(const T *)(p[0] + i * s[0]), b = *(const T *)(p[1] + i * s[1]);      \
    ((R *)to)[i] = (E);                                                          \
  }                                                                              \
  return 1
/* Sums of integers wrap around, as those of unsigned ones do. */
#define ARITHMETIC(E)                            \
  switch (type) {                                \
    case I32: LOOP(uint32_t, uint32_t, E);       \
    case I64: LOOP(u64, u64, E);                 \
    case F32: LOOP(float, float, E);             \
    case F64: LOOP(double, double, E);           \
    default: return 0;                           \
  }
/* Quotients of floats, and of whole numbers, where a divisor of zero is refused. */
#define FLOATS(E)                                \
  switch (type) {                                \
    case F32: LOOP(float, float, E);             \
    case F64: LOOP(double, double, E);           \
    default: return 0;                           \
  }
#define WHOLE_LOOP(T, W, E)                                                      \
  for (int64_t i = 0; i < n; i++) {                                              \
    T a = *(const T *)(p[0] + i * s[0]), b = *(const T *)(p[1] + i * s[1]);      \
    if (!b) return 0;                                                            \
    T rest = b == -1 ? 0 : a % b, whole = b == -1 ? (T)(0 - (W)a) : a / b;       \
    int below = rest && (rest < 0) != (b < 0);                                   \
    ((T *)to)[i] = (E);                                                          \
  }                                                                              \
  return 1
#define WHOLE(E)                                 \
  switch (type) {                                \
    case I32: WHOLE_LOOP(int32_t, uint32_t, E);  \
    case I64: WHOLE_LOOP(int64_t, u64, E);       \
    default: return 0;                           \
  }
#define COMPARISON(E)                            \
  switch (type) {                                \
    case I32: LOOP(int32_t, uint8_t, E);         \
    case I64: LOOP(int64_t, uint8_t, E);         \
    case F32: LOOP(float, uint8_t, E);           \
    case F64: LOOP(double, uint8_t, E);          \
    default: return 0;                           \
  }
#define CHOICE(E)                                \
  switch (type) {                                \
    case I32: LOOP(int32_t, int32_t, E);         \
    case I64: LOOP(int64_t, int64_t, E);         \
    case F32: LOOP(float, float, E);             \
    case F64: LOOP(double, double, E);           \
    default: return 0;                           \
  }

static int same(View a, View b) { return a.n == b.n && !memcmp(a.p, b.p, a.n); }

/* A function of `n` elements of each input, which lie s[] bytes apart. */
static int apply(int what, int64_t type, int64_t n, const uint8_t *const *p, const int64_t *s, uint8_t *to) {
  switch (what) {
    case ADD: ARITHMETIC(a + b)
    case SUBTRACT: ARITHMETIC(a - b)
    case MULTIPLY: ARITHMETIC(a * b)
    case LESS: COMPARISON(a < b)
    case LESS_EQUAL: COMPARISON(a <= b)
    case GREATER: COMPARISON(a > b)
    case GREATER_EQUAL: COMPARISON(a >= b)
    case EQUAL:
      if (type == TEXT) { LOOP(View, uint8_t, same(a, b)); }
      if (type == BOOL) { LOOP(uint8_t, uint8_t, a == b); }
      COMPARISON(a == b)
    case NOT_EQUAL:
      if (type == TEXT) { LOOP(View, uint8_t, !same(a, b)); }
      if (type == BOOL) { LOOP(uint8_t, uint8_t, a != b); }
      COMPARISON(a != b)
    case MAXIMUM: CHOICE(b > a || b != b ? b : a)
    case MINIMUM: CHOICE(b < a || b != b ? b : a)
    case DIVIDE: FLOATS(a / b)
    case DIVIDE_NO_NAN: FLOATS(b == 0 ? 0 : a / b)
    case FLOOR_DIVIDE: WHOLE(whole - below)
    case FLOOR_MOD: WHOLE(below ? rest + b : rest)
    case AND: LOOP(uint8_t, uint8_t, a & b);
    case OR: LOOP(uint8_t, uint8_t, a | b);
    default:
      for (int64_t i = 0; i < n; i++) copy_one(to + i * WIDTH[type], p[0][i * s[0]] ? p[1] + i * s[1] : p[2] + i * s[2], WIDTH[type]);
      return 1;
  }
}

/* A function of the elements of two or three inputs, broadcast to one shape. */
static int elementwise(Run *run, const Value *in, int64_t count, Value *out, int64_t result, int64_t type, int what) {
  int64_t rank = 0, shape[AXES], steps[3][AXES], index[AXES] = {0}, s[3];
  const uint8_t *p[3];
  for (int64_t i = 0; i < count; i++) rank = in[i].rank > rank ? in[i].rank : rank;
  for (int64_t axis = 0; axis < rank; axis++) shape[axis] = 1;
  for (int64_t i = 0; i < count; i++) {
    int64_t before = rank - in[i].rank, step = WIDTH[in[i].type];
    p[i] = in[i].data;
    for (int64_t axis = 0; axis < before; axis++) steps[i][axis] = 0;
    for (int64_t axis = in[i].rank - 1; axis >= 0; axis--) {
      int64_t size = in[i].shape[axis], *all = shape + before + axis;
      steps[i][before + axis] = size == 1 ? 0 : step;
      step *= size;
      if (*all == 1) *all = size;
      else if (size != 1 && size != *all) return 0;
    }
  }
  uint8_t *to = make(run, out, result, rank, shape);
  if (!to) return 0;
  if (!out->size) return 1;
  int flat = 1;
  for (int64_t i = 0; i < count; i++) {
    flat &= in[i].size == out->size || in[i].size == 1;
    s[i] = in[i].size == 1 ? 0 : WIDTH[in[i].type];
  }
  if (flat) return apply(what, type, out->size, p, s, to);
  for (int64_t i = 0; i < count; i++) s[i] = steps[i][rank - 1];
  for (;;) {
    if (!apply(what, type, shape[rank - 1], p, s, to)) return 0;
    to += shape[rank - 1] * WIDTH[result];
    int64_t axis = rank - 2;
    for (; axis >= 0; axis--) {
      int over = ++index[axis] == shape[axis];
      for (int64_t i = 0; i < count; i++) p[i] += steps[i][axis] * (over ? 1 - shape[axis] : 1);
      if (!over) break;
      index[axis] = 0;
    }
    if (axis < 0) return 1;
  }
}

static int binary(Run *run, In in, Value *out, int what) {
  int64_t type = in[0]->type;
  Value both[2] = {*in[0], *in[1]};
  if (type != in[1]->type || (what >= AND && type != BOOL)) return 0;
  return elementwise(run, both, 2, out, what >= LESS && what <= NOT_EQUAL ? BOOL : type, type, what);
}

#define BINARY(name, what) \
  static int name(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return binary(run, in, out[0], what); }
BINARY(add, ADD)
BINARY(subtract, SUBTRACT)
BINARY(multiply, MULTIPLY)
BINARY(divide, DIVIDE)
BINARY(divide_no_nan, DIVIDE_NO_NAN)
BINARY(floor_divide, FLOOR_DIVIDE)
BINARY(floor_mod, FLOOR_MOD)
BINARY(less, LESS)
BINARY(less_equal, LESS_EQUAL)
BINARY(greater, GREATER)
BINARY(greater_equal, GREATER_EQUAL)
BINARY(equal, EQUAL)
BINARY(not_equal, NOT_EQUAL)
BINARY(maximum, MAXIMUM)
BINARY(minimum, MINIMUM)
BINARY(logical_and, AND)
BINARY(logical_or, OR)

static int logical_not(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  if (in[0]->type != BOOL || !make_like(run, out[0], BOOL, in[0])) return 0;
  for (int64_t i = 0; i < in[0]->size; i++) out[0]->data[i] = !in[0]->data[i];
  return 1;
}

#define UNARY_LOOP(T, W, E)                                  \
  for (int64_t i = 0; i < in[0]->size; i++) {                \
    T a = ((const T *)in[0]->data)[i];                       \
    W w = a;                                                 \
    ((W *)out[0]->data)[i] = (E);                            \
  }                                                          \
  return 1
#define UNARY(name, E)                                                                              \
  static int name(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {                  \
    if (!make_like(run, out[0], in[0]->type, in[0])) return 0;                                      \
    switch (in[0]->type) {                                                                          \
      case I32: UNARY_LOOP(int32_t, uint32_t, E);                                                   \
      case I64: UNARY_LOOP(int64_t, u64, E);                                                        \
      case F32: UNARY_LOOP(float, float, E);                                                        \
      case F64: UNARY_LOOP(double, double, E);                                                      \
      default: return 0;                                                                            \
    }                                                                                               \
  }
UNARY(negative, -w)
UNARY(square, w * w)
UNARY(root, __builtin_sqrt(a))

static int select_v2(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  Value all[3] = {*in[0], *in[1], *in[2]};
  if (in[0]->type != BOOL || in[1]->type != in[2]->type) return 0;
  return elementwise(run, all, 3, out[0], in[1]->type, in[1]->type, SELECT);
}

/* A condition of one axis chooses whole rows. */
static int select_rows(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  Value condition = *in[0];
  const Value *const all[3] = {&condition, in[1], in[2]};
  for (; condition.rank && condition.rank < in[1]->rank && in[0]->rank == 1; condition.rank++) condition.shape[condition.rank] = 1;
  return select_v2(run, all, 3, out, attrs);
}

#define CONVERT(T, R)                                                                                       \
  for (int64_t i = 0; i < in[0]->size; i++) ((R *)out[0]->data)[i] = (R)((const T *)in[0]->data)[i];        \
  return 1
#define CONVERT_TO(T)                                                                                       \
  switch (attrs[0]) {                                                                                       \
    case BOOL:                                                                                              \
      for (int64_t i = 0; i < in[0]->size; i++) out[0]->data[i] = ((const T *)in[0]->data)[i] != 0;         \
      return 1;                                                                                             \
    case I32: CONVERT(T, int32_t);                                                                          \
    case I64: CONVERT(T, int64_t);                                                                          \
    case F32: CONVERT(T, float);                                                                            \
    case F64: CONVERT(T, double);                                                                           \
    default: return 0;                                                                                      \
  }

/* Floats become floats only: the function in NumPy is not made for others. */
static int cast(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  if (in[0]->type == attrs[0]) return *out[0] = *in[0], 1;
  if (!make_like(run, out[0], attrs[0], in[0])) return 0;
  switch (in[0]->type) {
    case BOOL: CONVERT_TO(uint8_t)
    case I32: CONVERT_TO(int32_t)
    case I64: CONVERT_TO(int64_t)
    case F32: if (attrs[0] == F64) { CONVERT(float, double); } return 0;
    case F64: if (attrs[0] == F32) { CONVERT(double, float); } return 0;
    default: return 0;
  }
}

/* Many floats behind each other are added up as doubles, since NumPy and TensorFlow do not add them one by one, either. */
#define REDUCE(T, WIDE, E)                                                                    \
  if (!step && n >= 8) {                                                                      \
    WIDE a = *(T *)to;                                                                        \
    for (int64_t i = 0; i < n; i++) { WIDE b = ((const T *)from)[i]; a = (E); }               \
    *(T *)to = a;                                                                             \
  } else                                                                                      \
    for (int64_t i = 0; i < n; i++) {                                                         \
      T *a_ = (T *)to + i * step, a = *a_, b = ((const T *)from)[i];                          \
      *a_ = (E);                                                                              \
    }                                                                                         \
  break
#define REDUCTION(E)                                  \
  switch (in[0]->type) {                              \
    case BOOL: REDUCE(uint8_t, uint8_t, E);           \
    case I32: REDUCE(uint32_t, uint32_t, E);          \
    case I64: REDUCE(u64, u64, E);                    \
    case F32: REDUCE(float, double, E);               \
    case F64: REDUCE(double, double, E);              \
  }                                                   \
  break

#include "host_segments.c"

/* NaN stays where there is one. */
#define EXTREME(T)                                                               \
  for (int64_t i = 0; i < n; i++) {                                              \
    T *a = (T *)to + i * step, b = ((const T *)from)[i];                         \
    if ((what == MAXIMUM ? b > *a : b < *a) || b != b) *a = b;                   \
  }                                                                              \
  break
#define EXTREMES                                      \
  switch (in[0]->type) {                              \
    case I32: EXTREME(int32_t);                       \
    case I64: EXTREME(int64_t);                       \
    case F32: EXTREME(float);                         \
    case F64: EXTREME(double);                        \
  }                                                   \
  break

static int reduction(Run *run, In in, Out out, const int64_t *attrs, int what) {
  int64_t rank = in[0]->rank, sizes[AXES + 1], steps[AXES + 1], index[AXES] = {0}, shape[AXES], left = 0, step = 1;
  int gone[AXES] = {0};
  if (!is_whole(in[1]) || in[0]->type > F64 || (what >= AND) != (in[0]->type == BOOL)) return 0;
  for (int64_t i = 0; i < in[1]->size; i++) {
    int64_t axis = whole(in[1], i) < 0 ? whole(in[1], i) + rank : whole(in[1], i);
    if (axis < 0 || axis >= rank || gone[axis]) return 0;
    gone[axis] = 1;
  }
  for (int64_t axis = 0; axis < rank; axis++)
    if (!gone[axis] || attrs[0]) shape[left++] = gone[axis] ? 1 : in[0]->shape[axis];
  if (what == ADD || what == OR) {
    if (!make(run, out[0], in[0]->type, left, shape)) return 0;
    memset(out[0]->data, 0, out[0]->size * WIDTH[in[0]->type]);
  } else if (what == MAXIMUM || what == MINIMUM) {
    if (!make(run, out[0], in[0]->type, left, shape)) return 0;
    begin_fold(what, in[0]->type, out[0]->size, out[0]->data, 0);
  } else {
    Value like = *in[0];
    like.rank = left;
    memcpy(like.shape, shape, left * 8);
    if (!constant_like(run, out[0], &like, 1)) return 0;
  }
  for (int64_t axis = rank - 1; axis >= 0; axis--) {
    sizes[axis] = in[0]->shape[axis], steps[axis] = gone[axis] ? 0 : step;
    step *= gone[axis] ? 1 : sizes[axis];
  }
  if (!in[0]->size) return 1;
  const uint8_t *from = in[0]->data;
  uint8_t *to = out[0]->data;
  int64_t width = WIDTH[in[0]->type], n = rank ? sizes[rank - 1] : 1;
  step = rank ? steps[rank - 1] : 0;
  for (;; from += n * width) {
    switch (what) {
      case ADD: REDUCTION(a + b);
      case MULTIPLY: REDUCTION(a * b);
      case MAXIMUM:
      case MINIMUM: EXTREMES;
      case AND:
        for (int64_t i = 0; i < n; i++) to[i * step] &= from[i] != 0;
        break;
      default:
        for (int64_t i = 0; i < n; i++) to[i * step] |= from[i] != 0;
    }
    int64_t axis = rank - 2;
    for (; axis >= 0; axis--) {
      int over = ++index[axis] == sizes[axis];
      to += steps[axis] * width * (over ? 1 - sizes[axis] : 1);
      if (!over) break;
      index[axis] = 0;
    }
    if (axis < 0) return 1;
  }
}

static int sum(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return reduction(run, in, out, attrs, ADD); }

static int product(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return reduction(run, in, out, attrs, MULTIPLY); }

static int most(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return reduction(run, in, out, attrs, MAXIMUM); }

static int least(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return reduction(run, in, out, attrs, MINIMUM); }

static int all(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return reduction(run, in, out, attrs, AND); }

static int any(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return reduction(run, in, out, attrs, OR); }

#include "host_sparse.c"

typedef int (*Step)(Run *run, In in, int64_t count, Out out, const int64_t *attrs);

static const struct { const char *op; Step step; } STEPS[] = {
    {"Identity", identity}, {"Snapshot", identity}, {"StopGradient", identity}, {"PreventGradient", identity}, {"NoOp", nothing},
    {"Assert", assertion}, {"If", guard}, {"StatelessIf", guard}, {"PartitionedCall", guard}, {"StatefulPartitionedCall", guard}, {"Shape", shape}, {"Size", size_of}, {"Rank", rank_of}, {"Reshape", reshape}, {"ExpandDims", expand_dims},
    {"Squeeze", squeeze}, {"GatherV2", gather}, {"ConcatV2", concat}, {"Pack", pack}, {"Tile", tile}, {"Fill", fill}, {"Slice", slice},
    {"StridedSlice", strided_slice}, {"ZerosLike", zeros_like}, {"OnesLike", ones_like}, {"OneHot", one_hot}, {"Add", add},
    {"AddV2", add}, {"Sub", subtract}, {"Mul", multiply}, {"Less", less}, {"LessEqual", less_equal}, {"Greater", greater},
    {"GreaterEqual", greater_equal}, {"Equal", equal}, {"NotEqual", not_equal}, {"Maximum", maximum}, {"Minimum", minimum},
    {"LogicalAnd", logical_and}, {"LogicalOr", logical_or}, {"LogicalNot", logical_not}, {"Select", select_rows}, {"SelectV2", select_v2},
    {"RealDiv", divide}, {"DivNoNan", divide_no_nan}, {"FloorDiv", floor_divide}, {"FloorMod", floor_mod}, {"Neg", negative},
    {"Square", square}, {"Sqrt", root}, {"Max", most}, {"Min", least}, {"BroadcastTo", broadcast_to}, {"Range", range},
    {"Cumsum", running_sum}, {"Bincount", counts}, {"DenseBincount", counts}, {"RaggedBincount", counts},
    {"UnsortedSegmentSum", unsorted_sum}, {"UnsortedSegmentProd", unsorted_product}, {"UnsortedSegmentMax", unsorted_most},
    {"UnsortedSegmentMin", unsorted_least}, {"SegmentSum", sorted_sum}, {"SegmentProd", sorted_product}, {"SegmentMax", sorted_most},
    {"SegmentMin", sorted_least}, {"SegmentMean", sorted_mean}, {"RaggedRange", ragged_range}, {"RaggedGather", ragged_gather},
    {"RaggedTensorToSparse", ragged_to_sparse}, {"LookupTableSizeV2", identity},
    {"Cast", cast}, {"Sum", sum}, {"Prod", product}, {"All", all}, {"Any", any}, {"SparseToDense", sparse_to_dense},
    {"SparseReshape", sparse_reshape}, {"SparseFillEmptyRows", fill_empty_rows}, {"Where", where}, {"Unique", unique},
    {"RaggedTensorToTensor", ragged_to_dense}, {"SparseCross", sparse_cross}, {"SparseSegmentSum", segment_sum},
    {"SparseSegmentMean", segment_mean}, {"SparseSegmentSqrtN", segment_sqrt_n}, {"StringLower", lower}, {"StringUpper", upper},
    {"StringStrip", strip}, {"StringSplitV2", split}, {"StaticRegexReplace", replace_bytes},
    {"StringToHashBucketFast", bucket_fast}, {"StringToHashBucketStrong", bucket_strong},
    {"StringToHashBucket", bucket_plain}, {"LookupTableFindV2", find}, {"ParseExampleV2", parse_examples},
    {"ParseExample", parse_examples}, {"ParseSingleExample", parse_examples},
};

/* The number of an op in code; -1 where it has none. */
int64_t step_number(const char *op) {
  for (int64_t i = 0; i < (int64_t)(sizeof STEPS / sizeof *STEPS); i++)
    if (!strcmp(STEPS[i].op, op)) return i;
  return -1;
}

/* Slots for keys that are numbers, all of them different; see `fill_slots`. */
void fill_number_slots(const uint8_t *keys, int64_t wide, int64_t count, uint32_t *slots, u64 last_slot) {
  for (int64_t i = 0; i < count; i++) {
    u64 slot = hash_of_number(wide ? ((const int64_t *)keys)[i] : ((const int32_t *)keys)[i]) & last_slot;
    while (slots[slot]) slot = (slot + 1) & last_slot;
    slots[slot] = i + 1;
  }
}

/* Where strings of CPython lie. Gives 0 where one is none. */
int view_strings(const Text *const *items, int64_t count, const void *type, View *made) {
  for (int64_t i = 0; i < count; i++) {
    if (items[i]->type != type) return 0;
    made[i].p = items[i]->data, made[i].n = items[i]->size;
  }
  return 1;
}

/* Gives the memory of a run back. */
void end_steps(Run *run) {
  for (Chunk *chunk = run->chunk, *before; chunk; chunk = before) {
    before = chunk->before;
    free(chunk);
  }
  free(run);
}

static int run_all(Run *run, const int64_t *program, const Value *given, Value *made) {
  const int64_t size = program[0], count = program[1], given_count = program[2], made_count = program[3], *at = program + 5;
  const int64_t *end = at + size, *places = end + count * (int64_t)(sizeof(Value) / 8);
  Value *values = allocate(run, count * sizeof *values);
  if (!values) return 0;
  memcpy(values, end, count * sizeof *values);
  for (int64_t i = 0; i < given_count; i++) {
    Value *value = values + *places++;
    *value = given[i];
    if (value->type != OBJECTS) continue;
    value->type = TEXT;
    View *views = allocate(run, value->size * sizeof *views);
    if (!views || !view_strings((const Text *const *)given[i].data, value->size, (const void *)program[4], views)) return 0;
    value->data = (uint8_t *)views;
  }
  while (at < end) {
    int64_t step = *at++, inputs = *at++, outputs = *at++, attrs = *at++;
    const Value **in = allocate(run, inputs * 8);
    Value **out = allocate(run, outputs * 8);
    if (!in || !out) return 0;
    for (int64_t i = 0; i < inputs; i++) in[i] = values + *at++;
    for (int64_t i = 0; i < outputs; i++) out[i] = values + *at++;
    if (!STEPS[step].step(run, in, inputs, out, at)) return 0;
    at += attrs;
  }
  for (int64_t i = 0; i < made_count; i++) made[i] = values[*places++];
  return 1;
}

/* Runs steps: gives what `end_steps` gives back, or 0 where a step can not be run. program: numbers of words of code, of values, of
   those that are given and of those that are made; the type of a string; the code; values that are constants, and memory for the others;
   places of those that are given, and of those that are made. The code of a step: its number in STEPS, numbers of inputs, outputs and
   attributes, then these; inputs and outputs are places among the values. */
Run *run_steps(const int64_t *program, const Value *given, Value *made) {
  Run *run = calloc(1, sizeof *run);
  if (run && !run_all(run, program, given, made)) {
    end_steps(run);
    return 0;
  }
  return run;
}
