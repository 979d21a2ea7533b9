/* Steps on sparse and ragged tensors, strings and serialized examples. `host_steps.c` includes this. */

/* Sparse and ragged tensors */

/* The sizes that a vector has; 0 where it is none, or one is negative, or all together are too many. */
static int sizes_of(const Value *in, int64_t *sizes) {
  int64_t total = 1;
  if (!is_whole(in) || in->rank != 1 || in->size > AXES) return 0;
  for (int64_t axis = 0; axis < in->size; axis++) {
    sizes[axis] = whole(in, axis);
    if (sizes[axis] < 0 || __builtin_mul_overflow(total, sizes[axis], &total)) return 0;
  }
  return 1;
}

/* Place of the index of number i in a tensor of such sizes that lies flat; -1 where it is out of bounds. */
static int64_t place_of(const Value *indices, int64_t i, int64_t rank, const int64_t *sizes) {
  int64_t place = 0;
  for (int64_t axis = 0; axis < rank; axis++) {
    int64_t index = whole(indices, i * rank + axis);
    if (index < 0 || index >= sizes[axis]) return -1;
    place = place * sizes[axis] + index;
  }
  return place;
}

static int sparse_to_dense(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const Value *indices = in[0], *values = in[2];
  int64_t sizes[AXES], rank = in[1]->size, width = WIDTH[values->type], last = -1;
  if (!is_whole(indices) || !sizes_of(in[1], sizes) || !rank || in[3]->rank || in[3]->type != values->type || values->rank > 1) return 0;
  int64_t n = indices->size / rank;
  if (indices->size % rank || (values->rank && values->size != n) || !make_asked(run, out[0], values->type, rank, sizes)) return 0;
  repeat(out[0]->data, in[3]->data, width, out[0]->size);
  for (int64_t i = 0; i < n; i++) {
    int64_t place = place_of(indices, i, rank, sizes);
    if (place < 0 || (attrs[0] && place <= last)) return 0;
    copy_one(out[0]->data + place * width, values->data + (values->rank ? i * width : 0), width);
    last = place;
  }
  return 1;
}

static int sparse_reshape(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t before[AXES], after[AXES], old = in[1]->size, rank = in[2]->size, total = 1, rest = 1, open = -1, n = in[0]->shape[0];
  if (in[0]->type != I64 || in[0]->rank != 2 || in[0]->shape[1] != old || in[1]->type != I64 || !sizes_of(in[1], before)) return 0;
  if (in[2]->type != I64 || in[2]->rank != 1 || rank > AXES) return 0;
  for (int64_t axis = 0; axis < old; axis++) total *= before[axis];
  for (int64_t axis = 0; axis < rank; axis++) {
    after[axis] = whole(in[2], axis);
    if (after[axis] == -1 && open < 0) open = axis;
    else if (after[axis] < 0 || __builtin_mul_overflow(rest, after[axis], &rest)) return 0;
  }
  if (open >= 0) {
    if (!rest || total % rest) return 0;
    after[open] = total / rest;
    rest = total;
  }
  if (rest != total) return 0;
  if (old == rank && !memcmp(before, after, rank * 8)) return *out[0] = *in[0], *out[1] = *in[1], 1;
  int64_t shape[2] = {n, rank}, *to = make(run, out[0], I64, 2, shape);
  if (!to || !make_vector(run, out[1], I64, rank)) return 0;
  memcpy(out[1]->data, after, rank * 8);
  for (int64_t i = 0; i < n; i++, to += rank) {
    int64_t place = place_of(in[0], i, old, before);
    if (place < 0) return 0;
    for (int64_t axis = rank - 1; axis >= 0; axis--) to[axis] = place % after[axis], place /= after[axis];
  }
  return 1;
}

static int fill_empty_rows(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const Value *values = in[1];
  if (in[0]->type != I64 || in[0]->rank != 2 || !is_whole(in[2]) || !in[2]->size || in[3]->rank || in[3]->type != values->type) return 0;
  int64_t n = in[0]->shape[0], rank = in[0]->shape[1], rows = whole(in[2], 0), width = WIDTH[values->type], total = n, last = 0;
  const int64_t *from = (const int64_t *)in[0]->data;
  if (!rank || values->rank != 1 || values->size != n || rows < 0 || rows > (int64_t)1 << 26) return 0;
  int64_t *start = allocate_zeros(run, (rows + 1) * 8);
  if (!start || !make_vector(run, out[2], BOOL, rows) || !make_vector(run, out[3], I64, n)) return 0;
  int sorted = 1;
  for (int64_t i = 0; i < n; i++) {
    int64_t row = from[i * rank];
    if (row < 0 || row >= rows) return 0;
    sorted &= row >= last;
    start[row + 1]++;
    last = row;
  }
  for (int64_t row = 0; row < rows; row++) {
    int empty = out[2]->data[row] = !start[row + 1];
    total += empty;
    start[row + 1] += start[row] + empty;
  }
  int64_t *back = (int64_t *)out[3]->data, shape[2] = {total, rank};
  if (total == n && sorted) {
    *out[0] = *in[0], *out[1] = *in[1];
    for (int64_t i = 0; i < n; i++) back[i] = i;
    return 1;
  }
  int64_t *to = make(run, out[0], I64, 2, shape);
  if (!to || !make_vector(run, out[1], values->type, total)) return 0;
  for (int64_t row = 0; row < rows; row++)
    if (out[2]->data[row]) {
      int64_t place = start[row];
      memset(to + place * rank, 0, rank * 8);
      to[place * rank] = row;
      copy_one(out[1]->data + place * width, in[3]->data, width);
    }
  for (int64_t i = 0; i < n; i++) {
    int64_t place = back[i] = start[from[i * rank]]++;
    memcpy(to + place * rank, from + i * rank, rank * 8);
    copy_one(out[1]->data + place * width, values->data + i * width, width);
  }
  return 1;
}

static int is_set(const Value *in, int64_t i) {
  switch (in->type) {
    case F32: return ((const float *)in->data)[i] != 0;
    case F64: return ((const double *)in->data)[i] != 0;
    default: return whole(in, i) != 0;
  }
}

static int where(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rank = in[0]->rank, shape[2] = {0, rank};
  if (!rank || in[0]->type > F64) return 0;
  if (in[0]->type == BOOL)
    for (int64_t i = 0; i < in[0]->size; i++) shape[0] += in[0]->data[i] != 0;
  else
    for (int64_t i = 0; i < in[0]->size; i++) shape[0] += is_set(in[0], i);
  int64_t *to = make(run, out[0], I64, 2, shape);
  if (!to) return 0;
  if (in[0]->type == BOOL && rank == 1) {  // a mask of ragged rows, in which nobody can foresee what is set
    int64_t *end = to + shape[0];
    for (int64_t i = 0; to < end; i++) *to = i, to += in[0]->data[i] != 0;
    return 1;
  }
  for (int64_t i = 0; i < in[0]->size; i++) {
    if (!is_set(in[0], i)) continue;
    int64_t left = i;
    for (int64_t axis = rank - 1; axis >= 0; axis--) to[axis] = left % in[0]->shape[axis], left /= in[0]->shape[axis];
    to += rank;
  }
  return 1;
}

static u64 hash_of_number(u64 value) { return mix(mix(value * K2) * K1); }

static u64 hash_of(const Value *in, int64_t i) {
  const View *text = (const View *)in->data + i;
  return in->type == TEXT ? farm(text->p, text->n) : hash_of_number(whole(in, i));
}

static int unique(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t n = in[0]->size, room = 4, found = 0, width = WIDTH[in[0]->type];
  if (in[0]->rank != 1 || !(is_whole(in[0]) || in[0]->type == TEXT) || n > (int64_t)1 << 30) return 0;
  while (room < 2 * n) room *= 2;
  uint32_t *slots = allocate_zeros(run, room * 4);
  int64_t *first = allocate(run, n * 8);
  if (!slots || !first || !make_vector(run, out[1], attrs[0], n)) return 0;
  for (int64_t i = 0; i < n; i++) {
    // Not the same in each call: values of a client that fall into one slot would be searched one by one.
    u64 slot = hash_of_number(hash_of(in[0], i) + (u64)(uintptr_t)run) & (room - 1);
    uint32_t number;
    for (; (number = slots[slot]); slot = (slot + 1) & (room - 1)) {
      const uint8_t *a = in[0]->data + i * width, *b = in[0]->data + first[number - 1] * width;
      if (in[0]->type == TEXT ? same(*(const View *)a, *(const View *)b) : !memcmp(a, b, width)) break;
    }
    if (!number) {
      first[found++] = i;
      number = slots[slot] = found;
    }
    put(out[1], i, number - 1);
  }
  if (!make_vector(run, out[0], in[0]->type, found)) return 0;
  for (int64_t i = 0; i < found; i++) copy_one(out[0]->data + i * width, in[0]->data + first[i] * width, width);
  return 1;
}

/* attrs: 1 where the last input has the row of each value, 0 where it has the splits between rows. */
static int ragged_to_dense(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const Value *values = in[1], *part = in[count - 1];
  int64_t by_rows = attrs[0], inner = WIDTH[values->type], shape[AXES], most = 0, here = 0, n = values->rank ? values->shape[0] : -1;
  if (!is_whole(part) || part->rank != 1 || !is_whole(in[0]) || n < 0 || values->rank >= AXES || in[2]->type != values->type) return 0;
  if (by_rows ? in[3]->size != 1 || !is_whole(in[3]) || part->size != n : !part->size) return 0;
  int64_t rows = by_rows ? whole(in[3], 0) : part->size - 1;
  if (rows < 0 || (!by_rows && (whole(part, 0) || whole(part, rows) != n))) return 0;
  for (int64_t i = 0, last = 0; i < (by_rows ? n : rows); i++) {
    int64_t row = by_rows ? whole(part, i) : 0, size = 0;
    if (by_rows ? row < last || row >= rows : whole(part, i + 1) < whole(part, i)) return 0;
    if (!by_rows) size = whole(part, i + 1) - whole(part, i);
    here = by_rows ? (i && row == last ? here + 1 : 1) : size;
    most = here > most ? here : most;
    last = row;
  }
  shape[0] = rows, shape[1] = most;
  for (int64_t axis = 1; axis < values->rank; axis++) inner *= shape[axis + 1] = values->shape[axis];
  if (in[0]->rank > 1 || (in[0]->rank && in[0]->size < 2)) return 0;
  for (int64_t axis = 0; in[0]->rank && axis < 2; axis++)
    if (whole(in[0], axis) >= 0) shape[axis] = whole(in[0], axis);
  if (in[2]->rank || !make(run, out[0], values->type, values->rank + 1, shape)) return 0;
  repeat(out[0]->data, in[2]->data, WIDTH[values->type], out[0]->size);
  if (!out[0]->size) return 1;
  for (int64_t i = 0, row = 0, column = 0; i < n; i++, column++) {
    int64_t own = row;
    if (by_rows) own = whole(part, i);
    else
      while (whole(part, own + 1) <= i) own++;
    if (own != row) row = own, column = 0;
    if (row < shape[0] && column < shape[1]) memcpy(out[0]->data + (row * shape[1] + column) * inner, values->data + i * inner, inner);
  }
  return 1;
}

/* The fingerprints of a column's values; numbers are their own. */
static const u64 *fingerprints(Run *run, const Value *in) {
  if (!is_whole(in) && in->type != TEXT) return 0;
  u64 *made = allocate(run, in->size * 8);
  for (int64_t i = 0; made && i < in->size; i++) made[i] = in->type == TEXT ? hash_of(in, i) : (u64)whole(in, i);
  return made;
}

/* attrs: sparse columns, buckets, salt. */
static int sparse_cross(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t sparse = attrs[0], columns = count - 2 * sparse, total = 0, most = 0, two[2] = {0, 2};
  if (!columns || (sparse && (!in[2 * sparse]->size || !is_whole(in[2 * sparse])))) return 0;
  int64_t rows = sparse ? whole(in[2 * sparse], 0) : in[0]->shape[0];
  if (rows < 0 || rows > (int64_t)1 << 30) return 0;
  const u64 **values = allocate(run, columns * 8);
  const int64_t **starts = allocate(run, columns * 8);
  for (int64_t column = 0; values && starts && column < columns; column++) {
    const Value *own = column < sparse ? in[sparse + column] : in[2 * sparse + column];
    int64_t *start = allocate_zeros(run, (rows + 1) * 8);
    if (!start || !(values[column] = fingerprints(run, own))) return 0;
    starts[column] = start;
    if (column < sparse) {
      const Value *indices = in[column];
      if (indices->type != I64 || indices->rank != 2 || !indices->shape[1] || indices->shape[0] != own->size) return 0;
      for (int64_t i = 0, last = 0; i < own->size; i++) {
        int64_t row = whole(indices, i * indices->shape[1]);
        if (row < last || row >= rows) return 0;
        start[row + 1]++;
        last = row;
      }
      for (int64_t row = 0; row < rows; row++) start[row + 1] += start[row];
    } else {
      if (own->rank != 2 || own->shape[0] != rows) return 0;
      for (int64_t row = 0; row <= rows; row++) start[row] = row * own->shape[1];
    }
  }
  if (!values || !starts) return 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t size = 1;
    for (int64_t column = 0; column < columns; column++)
      if (__builtin_mul_overflow(size, starts[column][row + 1] - starts[column][row], &size)) return 0;
    if (__builtin_add_overflow(total, size, &total)) return 0;
    most = size > most ? size : most;
  }
  two[0] = total;
  if (!make(run, out[0], I64, 2, two) || !make_vector(run, out[1], I64, total) || !make_vector(run, out[2], I64, 2)) return 0;
  cross_columns(columns, (const u64 *const *)values, (const int64_t *const *)starts, rows, attrs[2], attrs[1] ? attrs[1] : INT64_MAX, (int64_t *)out[0]->data, (u64 *)out[1]->data);
  put(out[2], 0, rows);
  put(out[2], 1, most);
  return 1;
}

/* Sums in TensorFlow's order: up to nine rows first, then eight at a time. It divides where there are ten, and else multiplies. */
#define SEGMENT(T)                                                                                          \
  {                                                                                                         \
    const T *data = (const T *)in[0]->data;                                                                 \
    T *to = (T *)out[0]->data + id * inner, by = how == 1 ? (T)n : how == 2 ? (T)__builtin_sqrt((double)n) : 1; \
    int64_t head = n == 1 ? 1 : n % 8 < 2 ? n % 8 + 8 : n % 8;                                              \
    for (int64_t i = 0; i < inner; i++) {                                                                   \
      T made = data[whole(in[1], first) * inner + i];                                                       \
      for (int64_t row = 1; row < head; row++) made += data[whole(in[1], first + row) * inner + i];         \
      if (n < 10) made *= (T)1 / by;                                                                        \
      for (int64_t row = head; row < n; row += 8) {                                                         \
        T part = data[whole(in[1], first + row) * inner + i];                                               \
        for (int64_t more = 1; more < 8; more++) part += data[whole(in[1], first + row + more) * inner + i]; \
        made += part;                                                                                       \
      }                                                                                                     \
      to[i] = n < 10 ? made : made / by;                                                                    \
    }                                                                                                       \
  }

static int segments(Run *run, In in, Value *const *out, int how) {
  int64_t ids = in[2]->size, inner = 1, shape[AXES];
  if (!is_whole(in[1]) || !is_whole(in[2]) || in[1]->rank != 1 || in[2]->rank != 1 || in[1]->size != ids || !in[0]->rank) return 0;
  for (int64_t i = 0; i < ids; i++)
    if (whole(in[1], i) < 0 || whole(in[1], i) >= in[0]->shape[0] || whole(in[2], i) < (i ? whole(in[2], i - 1) : 0)) return 0;
  if (ids && whole(in[2], ids - 1) == INT64_MAX) return 0;
  shape[0] = ids ? whole(in[2], ids - 1) + 1 : 0;
  for (int64_t axis = 1; axis < in[0]->rank; axis++) inner *= shape[axis] = in[0]->shape[axis];
  if (!make_asked(run, out[0], in[0]->type, in[0]->rank, shape)) return 0;
  memset(out[0]->data, 0, out[0]->size * WIDTH[in[0]->type]);
  for (int64_t first = 0, n; first < ids; first += n) {
    int64_t id = whole(in[2], first);
    for (n = 1; first + n < ids && whole(in[2], first + n) == id;) n++;
    if (in[0]->type == F32) SEGMENT(float)
    else if (in[0]->type == F64) SEGMENT(double)
    else return 0;
  }
  return 1;
}

static int segment_sum(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return segments(run, in, out, 0); }

static int segment_mean(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return segments(run, in, out, 1); }

static int segment_sqrt_n(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return segments(run, in, out, 2); }

/* Strings */

static int change_case(Run *run, const Value *in, Value *out, int first, int last) {
  int64_t total = 0;
  if (in->type != TEXT || !make_like(run, out, TEXT, in)) return 0;
  const View *from = (const View *)in->data;
  View *to = (View *)out->data;
  for (int64_t i = 0; i < in->size; i++) total += from[i].n;
  uint8_t *bytes = allocate(run, total);
  if (!bytes) return 0;
  for (int64_t i = 0; i < in->size; i++) {
    to[i].p = bytes, to[i].n = from[i].n;
    for (int64_t k = 0; k < from[i].n; k++) *bytes++ = from[i].p[k] ^ (from[i].p[k] >= first && from[i].p[k] <= last ? 0x20 : 0);
  }
  return 1;
}

static int lower(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return change_case(run, in[0], out[0], 'A', 'Z'); }

static int upper(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return change_case(run, in[0], out[0], 'a', 'z'); }

static int is_space(uint8_t byte) { return byte == ' ' || (byte >= 9 && byte <= 13); }

static int strip(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  if (in[0]->type != TEXT || !make_like(run, out[0], TEXT, in[0])) return 0;
  for (int64_t i = 0; i < in[0]->size; i++) {
    View text = ((const View *)in[0]->data)[i];
    while (text.n && is_space(text.p[text.n - 1])) text.n--;
    while (text.n && is_space(*text.p)) text.p++, text.n--;
    ((View *)out[0]->data)[i] = text;
  }
  return 1;
}

/* attrs: what becomes of each byte; -1 for nothing. */
static int replace_bytes(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t total = 0;
  if (in[0]->type != TEXT || !make_like(run, out[0], TEXT, in[0])) return 0;
  const View *from = (const View *)in[0]->data;
  View *to = (View *)out[0]->data;
  for (int64_t i = 0; i < in[0]->size; i++) total += from[i].n;
  uint8_t *bytes = allocate(run, total);
  if (!bytes) return 0;
  for (int64_t i = 0; i < in[0]->size; i++) {
    to[i].p = bytes;
    for (int64_t k = 0; k < from[i].n; k++) {
      int64_t byte = attrs[from[i].p[k]];
      if (byte >= 0) *bytes++ = byte;
    }
    to[i].n = bytes - to[i].p;
  }
  return 1;
}

/* The next piece of a text, from `*at` on, which moves behind the separator; 0 where there is none. Without a separator, pieces lie between
   white space. */
static int next_piece(View text, View separator, int64_t *at, View *piece) {
  int64_t start = *at, end;
  if (!separator.n) {
    while (start < text.n && is_space(text.p[start])) start++;
    for (end = start; end < text.n && !is_space(text.p[end]);) end++;
    *at = end;
    if (end > start) piece->p = text.p + start, piece->n = end - start;
    return end > start;
  }
  if (start > text.n) return 0;
  for (end = start; end + separator.n <= text.n && memcmp(text.p + end, separator.p, separator.n);) end++;
  int last = end + separator.n > text.n;
  if (last) end = text.n;
  *at = last ? text.n + 1 : end + separator.n;
  piece->p = text.p + start, piece->n = end - start;
  return 1;
}

static int split(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  int64_t rows = in[0]->size, pair[2] = {0, 2}, most = 0;
  if (in[0]->type != TEXT || in[0]->rank != 1 || in[1]->type != TEXT || in[1]->size != 1) return 0;
  const View *texts = (const View *)in[0]->data, separator = *(const View *)in[1]->data;
  View piece;
  for (int64_t row = 0; row < rows; row++) {
    int64_t at = 0, here = 0;
    while (next_piece(texts[row], separator, &at, &piece)) here++;
    pair[0] += here;
    most = here > most ? here : most;
  }
  int64_t *index = make(run, out[0], I64, 2, pair);
  View *to = make_vector(run, out[1], TEXT, pair[0]);
  if (!index || !to || !make_vector(run, out[2], I64, 2)) return 0;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t at = 0, column = 0; next_piece(texts[row], separator, &at, to); column++, to++) *index++ = row, *index++ = column;
  put(out[2], 0, rows);
  put(out[2], 1, most);
  return 1;
}

/* attrs: buckets, and 2 numbers that are the key of SipHash. */
static int hash_buckets(Run *run, const Value *in, Value *out, const int64_t *attrs, int kind) {
  if (in->type != TEXT || !make_like(run, out, I64, in) || attrs[0] < 1) return 0;
  for (int64_t i = 0; i < in->size; i++) {
    View text = ((const View *)in->data)[i];
    u64 hash = kind == 0 ? farm(text.p, text.n) : kind == 1 ? sip(text.p, text.n, attrs[2], attrs[3]) : plain(text.p, text.n);
    ((u64 *)out->data)[i] = hash % (u64)attrs[0];
  }
  return 1;
}

static int bucket_fast(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return hash_buckets(run, in[0], out[0], attrs, 0); }

static int bucket_strong(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return hash_buckets(run, in[0], out[0], attrs, 1); }

static int bucket_plain(Run *run, In in, int64_t count, Out out, const int64_t *attrs) { return hash_buckets(run, in[0], out[0], attrs, 2); }

/* Inputs: slots as `fill_slots` has them, keys, what is asked, and the value of each key and behind them that of all others. */
static int find(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const Value *keys = in[1], *asked = in[2], *values = in[3];
  const uint32_t *slots = (const uint32_t *)in[0]->data;
  int64_t last = in[0]->size - 1, width = WIDTH[values->type];
  if (asked->type != keys->type || !make_like(run, out[0], values->type, asked)) return 0;
  for (int64_t i = 0; i < asked->size; i++) {
    const View *text = (const View *)asked->data + i;
    u64 slot = hash_of(asked, i) & last;
    uint32_t key;
    for (; (key = slots[slot]); slot = (slot + 1) & last)
      if (keys->type == TEXT ? same(((const View *)keys->data)[key - 1], *text) : whole(keys, key - 1) == whole(asked, i)) break;
    copy_one(out[0]->data + i * width, values->data + (key ? key - 1 : keys->size) * width, width);
  }
  return 1;
}

/* Examples */

static const int64_t KINDS[] = {0, 0, 3, 2, 0, 1, 0};

/* A list of a row: its kind (1 bytes, 2 floats, 3 integers, 0 none), where it lies, and its values. */
typedef struct { Bytes list; int64_t kind, count; } Found;

/* Where the lists of an example lie, of each key `rows` behind that of the one before. Of two with one key, the last one counts. Gives 0
   where it is no example. */
static int scan(View row, const View *keys, int64_t count, Found *found, int64_t rows) {
  Bytes example = {row.p, row.p + row.n}, features, entry, part;
  u64 tag, value;
  while (example.p < example.end) {
    if (!field(&example, &tag, &features, &value)) return 0;
    if (tag != 10) continue;
    while (features.p < features.end) {
      if (!field(&features, &tag, &entry, &value)) return 0;
      if (tag != 10) continue;
      Bytes key = {row.p, row.p}, feature = key;
      while (entry.p < entry.end) {
        if (!field(&entry, &tag, &part, &value)) return 0;
        if (tag == 10) key = part;
        if (tag == 18) feature = part;
      }
      Found made = {{row.p, row.p}, 0, 0};
      while (feature.p < feature.end) {
        if (!field(&feature, &tag, &part, &value)) return 0;
        if (tag == 10 || tag == 18 || tag == 26) made.kind = tag >> 3, made.list = part;
      }
      View name = {key.p, key.end - key.p};
      for (int64_t which = 0; which < count; which++)
        if (same(keys[which], name)) {
          found[which * rows] = made;
          break;
        }
    }
  }
  return 1;
}

/* Values of each row in one shape, a default where a row has none. */
static int dense_feature(Run *run, const Found *found, int64_t rows, int64_t most, int single, const Value *given, const int64_t *sizes,
                         int64_t rank, int64_t type, Value *out) {
  int64_t shape[AXES + 1], width = WIDTH[type], inner = 1, open = rank && sizes[0] < 0;
  if (rank + 1 > AXES || (given->size && given->type != type)) return 0;
  for (int64_t axis = open; axis < rank; axis++)
    if (sizes[axis] < 0 || __builtin_mul_overflow(inner, sizes[axis], &inner)) return 0;
  for (int64_t row = 0; row < rows; row++)
    if (open ? !inner || found[row].count % inner : found[row].kind && found[row].count != inner) return 0;
  shape[0] = rows;
  memcpy(shape + 1, sizes, rank * 8);
  if (open) shape[1] = most / inner;
  uint8_t *to = make(run, out, type, rank + !single, shape + single);
  if (!to) return 0;
  for (int64_t row = 0; row < rows; row++) {
    int64_t count = found[row].count, room = open ? most : inner;
    if (count && read_list(found[row].list, KINDS[type], to) < 0) return 0;
    if (open) {
      if (given->size) repeat(to + count * width, given->data, width, most - count);
      else memset(to + count * width, 0, (most - count) * width);
      for (int64_t i = count; type == TEXT && !given->size && i < most; i++) ((View *)to)[i].p = to;
    } else if (!found[row].kind && inner) {
      if (given->size == inner) memcpy(to, given->data, inner * width);
      else if (given->size == 1) repeat(to, given->data, width, inner);
      else return 0;
    }
    to += room * width;
  }
  return 1;
}

/* Inputs: examples, keys, a default of each dense feature. attrs: numbers of sparse, dense and ragged features, types of all and of
   ragged ones' splits, axes and sizes of each dense one. */
static int parse_examples(Run *run, In in, int64_t count, Out out, const int64_t *attrs) {
  const int64_t sparse = attrs[0], dense = attrs[1], ragged = attrs[2], keys = sparse + dense + ragged;
  const int64_t *types = attrs + 3, *splits = types + keys, *shapes = splits + ragged, rows = in[0]->size, single = !in[0]->rank;
  if (in[0]->type != TEXT || in[0]->rank > 1 || (single && ragged) || in[1]->size != keys || count != 2 + dense) return 0;
  Found *found = allocate_zeros(run, rows * keys * sizeof *found);
  if (!found) return 0;
  for (int64_t row = 0; row < rows; row++)
    if (!scan(((const View *)in[0]->data)[row], (const View *)in[1]->data, keys, found + row, rows)) return 0;
  for (int64_t key = 0; key < keys; key++, found += rows) {
    int64_t total = 0, most = 0, type = types[key], width = WIDTH[type];
    for (int64_t row = 0; row < rows; row++) {
      if (!found[row].kind) continue;
      if (found[row].kind != KINDS[type] || (found[row].count = read_list(found[row].list, KINDS[type], 0)) < 0) return 0;
      total += found[row].count;
      most = found[row].count > most ? found[row].count : most;
    }
    if (key >= sparse && key < sparse + dense) {
      int64_t number = key - sparse;
      if (!dense_feature(run, found, rows, most, single, in[2 + number], shapes + 1, *shapes, type, out[3 * sparse + number])) return 0;
      shapes += 1 + *shapes;
      continue;
    }
    int64_t number = key - sparse - dense, pair[2] = {total, single ? 1 : 2};
    Value *values = key < sparse ? out[sparse + key] : out[3 * sparse + dense + number];
    uint8_t *to = make_vector(run, values, type, total);
    if (!to) return 0;
    for (int64_t row = 0; row < rows; row++) {
      if (found[row].count && read_list(found[row].list, KINDS[type], to) < 0) return 0;
      to += found[row].count * width;
    }
    if (key < sparse) {
      int64_t *index = make(run, out[key], I64, 2, pair);
      if (!index || !make_vector(run, out[2 * sparse + key], I64, 2 - single)) return 0;
      for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < found[row].count; i++) {
          if (!single) *index++ = row;
          *index++ = i;
        }
      if (!single) put(out[2 * sparse + key], 0, rows);
      put(out[2 * sparse + key], 1 - single, most);
    } else {
      Value *ends = out[3 * sparse + dense + ragged + number];
      if (!make_vector(run, ends, splits[number], rows + 1)) return 0;
      put(ends, 0, 0);
      for (int64_t row = 0, end = 0; row < rows; row++) put(ends, row + 1, end += found[row].count);
    }
  }
  return 1;
}
