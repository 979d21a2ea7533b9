/* Steps on segments, counts, ranges and ragged rows. `host_steps.c` includes this. */

/* Rows that become one. Of equal numbers, and of NaN, the largest and the smallest is the later one, or with FIRST the earlier one. */
enum { FIRST = 64 };
#define FOLD(T, E) do { for (int64_t i = 0; i < n; i++) { T a = ((T *)to)[i], b = ((const T *)from)[i]; ((T *)to)[i] = (E); } } while (0)
#define FOLDS(T, W)                                                 \
  switch (what) {                                                   \
    case ADD: FOLD(W, a + b); return;                               \
    case MULTIPLY: FOLD(W, a * b); return;                          \
    case MAXIMUM: FOLD(T, b < a ? a : b); return;                   \
    case MINIMUM: FOLD(T, a < b ? a : b); return;                   \
    case MAXIMUM | FIRST: FOLD(T, a < b ? b : a); return;           \
    case MINIMUM | FIRST: FOLD(T, b < a ? b : a); return;           \
  }

static void fold(int what, int64_t type, int64_t n, uint8_t *to, const uint8_t *from) {
  switch (type) {
    case I32: FOLDS(int32_t, uint32_t)
    case I64: FOLDS(int64_t, u64)
    case F32: FOLDS(float, float)
    default: FOLDS(double, double)
  }
}

/* What a fold begins with. `finite`: the largest number and not infinity. */
static void begin_fold(int what, int64_t type, int64_t n, uint8_t *to, int finite) {
  const int low = what == MAXIMUM;
  for (int64_t i = 0; i < n; i++)
    switch (type) {
      case I32: ((int32_t *)to)[i] = what == ADD ? 0 : what == MULTIPLY ? 1 : low ? INT32_MIN : INT32_MAX; break;
      case I64: ((int64_t *)to)[i] = what == ADD ? 0 : what == MULTIPLY ? 1 : low ? INT64_MIN : INT64_MAX; break;
      case F32: {
        const float most = finite ? __FLT_MAX__ : __builtin_inff();
        ((float *)to)[i] = what == ADD ? 0 : what == MULTIPLY ? 1 : low ? -most : most;
        break;
      }
      default: {
        const double most = finite ? __DBL_MAX__ : __builtin_inf();
        ((double *)to)[i] = what == ADD ? 0 : what == MULTIPLY ? 1 : low ? -most : most;
      }
    }
}

static int is_number(const Value *in) { return in->type >= I32 && in->type <= F64; }

/* Rows behind axes of `data` that `ids` has, too, become one for each number, one by one. Rows of negative numbers are left out. */
static int unsorted_segments(Run *run, In in, Value *out, int what) {
  const Value *data = in[0], *ids = in[1];
  int64_t shape[AXES], inner = 1, rank = data->rank - ids->rank + 1, width = WIDTH[data->type];
  if (!is_number(data) || !is_whole(ids) || !is_whole(in[2]) || in[2]->rank || rank < 1 || rank > AXES) return 0;
  if (memcmp(data->shape, ids->shape, ids->rank * 8)) return 0;
  int64_t rows = shape[0] = whole(in[2], 0);
  for (int64_t axis = 1; axis < rank; axis++) inner *= shape[axis] = data->shape[ids->rank + axis - 1];
  if (!make_asked(run, out, data->type, rank, shape)) return 0;
  begin_fold(what, data->type, out->size, out->data, 1);
  for (int64_t i = 0; i < ids->size; i++) {
    int64_t row = whole(ids, i);
    if (row >= rows) return 0;
    if (row >= 0) fold(what, data->type, inner, out->data + row * inner * width, data->data + i * inner * width);
  }
  return 1;
}

/* Rows that become one, as TensorFlow has it. Columns of 32 bytes: where there are 16 rows to sum or multiply, in four parts, which are put
   together; of numbers that are equal or NaN, the first. Columns that are left, and means, row by row. */
static int fold_segment(Run *run, int what, int mean, int64_t type, int64_t n, int64_t inner, uint8_t *to, const uint8_t *from) {
  const int64_t width = WIDTH[type], row = inner * width, extreme = what == MAXIMUM || what == MINIMUM;
  int64_t wide = type >= F32 && !mean && (n >= 16 || extreme) ? inner - inner % (32 / width) : 0, done = 0;
  begin_fold(what, type, inner, to, 0);
  if (wide && !extreme) {
    uint8_t *parts[4] = {to};
    for (int64_t i = 1; i < 4; i++) {
      if (!(parts[i] = allocate(run, row))) return 0;
      begin_fold(what, type, wide, parts[i], 0);
    }
    for (; done < n / 4 * 4; done++) fold(what, type, wide, parts[done % 4], from + done * row);
    for (int64_t i = 1; i < 4; i++) fold(what, type, wide, to, parts[i]);
  }
  for (; wide && done < n; done++) fold(extreme ? what | FIRST : what, type, wide, to, from + done * row);
  for (int64_t i = 0; wide < inner && i < n; i++) fold(what, type, inner - wide, to + wide * width, from + i * row + wide * width);
  return 1;
}

/* Rows of each number become one; numbers do not decrease. */
static int sorted_segments(Run *run, In in, Value *out, int what, int mean) {
  const Value *data = in[0], *ids = in[1];
  int64_t shape[AXES], inner = 1, count = ids->size, last = 0, width = WIDTH[data->type];
  if (!is_number(data) || (mean && is_whole(data)) || !is_whole(ids) || ids->rank != 1 || !data->rank || data->shape[0] != count) return 0;
  for (int64_t i = 0; i < count; last = whole(ids, i++))
    if (whole(ids, i) < last) return 0;
  if (last == INT64_MAX) return 0;
  shape[0] = count ? last + 1 : 0;
  for (int64_t axis = 1; axis < data->rank; axis++) inner *= shape[axis] = data->shape[axis];
  if (!make_asked(run, out, data->type, data->rank, shape)) return 0;
  if (what == MULTIPLY) begin_fold(what, data->type, out->size, out->data, 0);
  else memset(out->data, 0, out->size * width);
  for (int64_t first = 0, n; first < count; first += n) {
    int64_t id = whole(ids, first);
    for (n = 1; first + n < count && whole(ids, first + n) == id;) n++;
    uint8_t *to = out->data + id * inner * width;
    const uint8_t *from = data->data + first * inner * width;
    if (n == 1) memcpy(to, from, inner * width);
    else if (!fold_segment(run, what, mean, data->type, n, inner, to, from)) return 0;
    for (int64_t i = 0; mean && n > 1 && i < inner; i++)
      if (data->type == F32) ((float *)to)[i] /= n;
      else ((double *)to)[i] /= n;
  }
  return 1;
}

#define SEGMENTS(name, what)                                                                                                                     \
  static int unsorted_##name(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return unsorted_segments(run, in, out[0], what); } \
  static int sorted_##name(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return sorted_segments(run, in, out[0], what, 0); }
SEGMENTS(sum, ADD)
SEGMENTS(product, MULTIPLY)
SEGMENTS(most, MAXIMUM)
SEGMENTS(least, MINIMUM)

static int sorted_mean(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return sorted_segments(run, in, out[0], ADD, 1); }

/* Places of ragged rows: begin with 0, do not decrease, and end with `size`. */
static int are_splits(const Value *splits, int64_t size) {
  if (!is_whole(splits) || splits->rank != 1 || !splits->size || whole(splits, 0) || whole(splits, splits->size - 1) != size) return 0;
  for (int64_t i = 1; i < splits->size; i++)
    if (whole(splits, i) < whole(splits, i - 1)) return 0;
  return 1;
}

/* attrs: 1 where it says only whether a number is there. With splits in front, for each ragged row. */
static int counts(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const Value *splits = count == 4 ? *in++ : 0, *numbers = in[0], *weights = in[2];
  if (!is_whole(numbers) || numbers->rank > 2 || !is_whole(in[1]) || in[1]->size != 1 || !is_number(weights)) return 0;
  if (weights->size && (attrs[0] || weights->size != numbers->size)) return 0;
  if (splits && (numbers->rank != 1 || !are_splits(splits, numbers->size))) return 0;
  int64_t rows = splits ? splits->size - 1 : numbers->rank == 2 ? numbers->shape[0] : 1, most = whole(in[1], 0);
  int64_t shape[2] = {rows, most}, by_row = splits || numbers->rank == 2, each = rows ? numbers->size / rows : 0;
  if (!make_asked(run, out[0], weights->type, 1 + by_row, shape + !by_row)) return 0;
  memset(out[0]->data, 0, out[0]->size * WIDTH[weights->type]);
  for (int64_t row = 0, i = 0; row < rows; row++)
    for (int64_t end = splits ? whole(splits, row + 1) : i + each; i < end; i++) {
      int64_t number = whole(numbers, i), place = row * most + number;
      if (number < 0) return 0;
      if (number >= most) continue;
#define COUNT(T) ((T *)out[0]->data)[place] = attrs[0] ? 1 : ((T *)out[0]->data)[place] + (weights->size ? ((const T *)weights->data)[i] : 1)
      switch (weights->type) {
        case I32: COUNT(uint32_t); break;
        case I64: COUNT(u64); break;
        case F32: COUNT(float); break;
        default: COUNT(double);
      }
    }
  return 1;
}

/* attrs: whether each number is left out of its own sum, and whether sums begin at the end. */
static int running_sum(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t along = axis_of(in[1], in[0]->rank), inner = WIDTH[in[0]->type], outer = 1;
  if (along < 0 || !is_number(in[0]) || !make_like(run, out[0], in[0]->type, in[0])) return 0;
  for (int64_t axis = 0; axis < along; axis++) outer *= in[0]->shape[axis];
  for (int64_t axis = along + 1; axis < in[0]->rank; axis++) inner *= in[0]->shape[axis];
  const int64_t n = in[0]->shape[along], each = inner / WIDTH[in[0]->type], step = attrs[1] ? -inner : inner;
  for (int64_t o = 0; n && o < outer; o++) {
    const uint8_t *from = in[0]->data + o * n * inner + (attrs[1] ? (n - 1) * inner : 0);
    uint8_t *to = out[0]->data + (from - in[0]->data);
    memset(to, 0, inner);
    if (!attrs[0]) fold(ADD, in[0]->type, each, to, from);
    for (int64_t i = 1; i < n; i++) {
      memcpy(to + step, to, inner);
      to += step;
      fold(ADD, in[0]->type, each, to, attrs[0] ? from : from + step);
      from += step;
    }
  }
  return 1;
}

/* How many numbers there are from `start` on, `step` apart, in front of `end`; -1 where none can be, or too many. */
static int64_t steps_to(int64_t start, int64_t end, int64_t step) {
  int64_t distance;
  if (!step || step == INT64_MIN || __builtin_sub_overflow(end, start, &distance) || distance == INT64_MIN) return -1;
  if (!distance || (distance > 0) != (step > 0)) return 0;
  distance = distance < 0 ? -distance : distance;
  step = step < 0 ? -step : step;
  int64_t found = distance / step + (distance % step > 0);
  return found > 1 << 26 ? -1 : found;
}

static int range(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  if (!is_whole(in[0]) || in[0]->size != 1 || in[1]->size != 1 || in[2]->size != 1 || in[1]->type != in[0]->type || in[2]->type != in[0]->type) return 0;
  int64_t start = whole(in[0], 0), end = whole(in[1], 0), step = whole(in[2], 0), n = steps_to(start, end, step);
  if ((start != end && (end > start) != (step > 0)) || n < 0 || !make_vector(run, out[0], in[0]->type, n)) return 0;
  for (int64_t i = 0; i < n; i++) put(out[0], i, start + i * step);
  return 1;
}

static int ragged_range(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rows = 1, total = 0;
  for (int i = 0; i < 3; i++) {
    if (!is_whole(in[i]) || in[i]->rank > 1 || in[i]->type != in[0]->type) return 0;
    if (in[i]->rank && rows != 1 && in[i]->size != rows) return 0;
    if (in[i]->rank) rows = in[i]->size;
  }
  for (int i = 0; i < 3; i++)
    if (in[i]->rank && in[i]->size != rows) return 0;
  if (!make_vector(run, out[0], attrs[0], rows + 1)) return 0;
  put(out[0], 0, 0);
  for (int64_t row = 0; row < rows; row++) {
    int64_t n = steps_to(whole(in[0], in[0]->rank ? row : 0), whole(in[1], in[1]->rank ? row : 0), whole(in[2], in[2]->rank ? row : 0));
    if (n < 0 || (total += n) > 1 << 26) return 0;
    put(out[0], row + 1, total);
  }
  if (!make_vector(run, out[1], in[0]->type, total)) return 0;
  for (int64_t row = 0, i = 0; row < rows; row++) {
    int64_t value = whole(in[0], in[0]->rank ? row : 0), step = whole(in[2], in[2]->rank ? row : 0);
    for (int64_t end = whole(out[0], row + 1); i < end; i++, value = (u64)value + (u64)step) put(out[1], i, value);
  }
  return 1;
}

/* attrs: how many splits there are, and how many it makes. Rows by index: those of each axis are spans of the next one's. */
static int ragged_gather(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const int64_t nested = attrs[0];
  const Value *values = in[nested], *indices = in[nested + 1];
  Value unnamed;
  if (!is_whole(indices) || !values->rank || count != nested + 2 || nested + indices->rank - 1 != attrs[1]) return 0;
  for (int64_t axis = 0; axis < nested; axis++)
    if (!are_splits(in[axis], axis + 1 < nested ? in[axis + 1]->size - 1 : values->shape[0])) return 0;
  int64_t *spans = allocate(run, indices->size * 16), rows = 1, extra = indices->rank - 1;
  if (!spans) return 0;
  for (int64_t i = 0; i < indices->size; i++) {
    spans[2 * i] = whole(indices, i), spans[2 * i + 1] = spans[2 * i] + 1;
    if (spans[2 * i] < 0 || spans[2 * i] >= in[0]->size - 1) return 0;
  }
  for (int64_t axis = 0; axis < extra; axis++) {
    rows *= indices->shape[axis];
    if (!make_vector(run, out[axis], in[0]->type, rows + 1)) return 0;
    for (int64_t i = 0; i <= rows; i++) put(out[axis], i, i * indices->shape[axis + 1]);
  }
  for (int64_t axis = 0; axis < nested; axis++) {
    Value *splits = extra + axis < 0 ? &unnamed : out[extra + axis];  // a scalar's row is all that there is
    int64_t total = 0, at = 0;
    for (int64_t i = 0; i < indices->size; i++) total += spans[2 * i + 1] - spans[2 * i];
    if (!make_vector(run, splits, in[axis]->type, total + 1)) return 0;
    put(splits, 0, 0);
    for (int64_t i = 0, end = 0; i < indices->size; i++) {
      for (int64_t row = spans[2 * i]; row < spans[2 * i + 1]; row++) put(splits, ++at, end += whole(in[axis], row + 1) - whole(in[axis], row));
      if (end > INT32_MAX) return 0;
      spans[2 * i] = whole(in[axis], spans[2 * i]), spans[2 * i + 1] = whole(in[axis], spans[2 * i + 1]);
    }
  }
  int64_t shape[AXES], inner = WIDTH[values->type];
  for (int64_t axis = 1; axis < values->rank; axis++) inner *= shape[axis] = values->shape[axis];
  shape[0] = 0;
  for (int64_t i = 0; i < indices->size; i++) shape[0] += spans[2 * i + 1] - spans[2 * i];
  uint8_t *to = make(run, out[extra + nested], values->type, values->rank, shape);
  for (int64_t i = 0; to && i < indices->size; i++) {
    int64_t size = (spans[2 * i + 1] - spans[2 * i]) * inner;
    memcpy(to, values->data + spans[2 * i] * inner, size);
    to += size;
  }
  return to != 0;
}

/* One ragged axis, of single values. */
static int ragged_to_sparse(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rows = in[0]->size - 1, most = 0, shape[2] = {in[1]->size, 2};
  if (in[1]->rank != 1 || !are_splits(in[0], in[1]->size)) return 0;
  int64_t *index = make(run, out[0], I64, 2, shape);
  if (!index || !make_vector(run, out[2], I64, 2)) return 0;
  *out[1] = *in[1];
  for (int64_t row = 0, i = 0; row < rows; row++) {
    int64_t start = i, end = whole(in[0], row + 1);
    for (; i < end; i++) *index++ = row, *index++ = i - start;
    most = end - start > most ? end - start : most;
  }
  put(out[2], 0, rows);
  put(out[2], 1, most);
  return 1;
}
