/* Hashes and lookups of many strings, and features of many serialized examples. `hashing.py` and `examples.py` call it and have the same
   in Python; `hatch_build.py` compiles it into the wheel.

   Strings of a tensor are an array of CPython's `bytes`, which hold still while the array holds them. They are read where they lie:
   `hashing.py` takes this library only where a `bytes` looks as it does here. */

#include <stdint.h>
#include <string.h>

typedef uint64_t u64;

static const u64 K0 = 0xc3a5c85c97cb3127ULL, K1 = 0xb492b66fbe98f273ULL, K2 = 0x9ae16a3b2f90404fULL;

static u64 at(const uint8_t *s) { u64 v; memcpy(&v, s, 8); return v; }
static u64 at32(const uint8_t *s) { uint32_t v; memcpy(&v, s, 4); return v; }
static u64 rotate(u64 v, int bits) { return (v >> bits) | (v << (64 - bits)); }
static u64 mix(u64 v) { return v ^ (v >> 47); }

static u64 pair(u64 u, u64 v, u64 mul) {
  u64 a = mix((u ^ v) * mul);
  return mix((v ^ a) * mul) * mul;
}

static void weak(const uint8_t *s, u64 a, u64 b, u64 *first, u64 *second) {
  u64 w = at(s), x = at(s + 8), y = at(s + 16), z = at(s + 24), c;
  a += w;
  b = rotate(b + a + z, 21);
  c = a;
  a += x + y;
  *first = a + z;
  *second = b + rotate(a, 44) + c;
}

/* FarmHash's Fingerprint64. */
static u64 farm(const uint8_t *s, u64 n) {
  u64 mul = K2 + n * 2, a, b, c, d;
  if (n <= 16) {
    if (n >= 8) {
      a = at(s) + K2, b = at(s + n - 8);
      return pair(rotate(b, 37) * mul + a, (rotate(a, 25) + b) * mul, mul);
    }
    if (n >= 4) return pair(n + (at32(s) << 3), at32(s + n - 4), mul);
    if (n) return mix((u64)(uint32_t)(s[0] + ((uint32_t)s[n >> 1] << 8)) * K2 ^ (u64)(n + ((u64)s[n - 1] << 2)) * K0) * K2;
    return K2;
  }
  if (n <= 32) {
    a = at(s) * K1, b = at(s + 8), c = at(s + n - 8) * mul, d = at(s + n - 16) * K2;
    return pair(rotate(a + b, 43) + rotate(c, 30) + d, a + rotate(b + K2, 18) + c, mul);
  }
  if (n <= 64) {
    a = at(s) * K2, b = at(s + 8), c = at(s + n - 8) * mul, d = at(s + n - 16) * K2;
    u64 y = rotate(a + b, 43) + rotate(c, 30) + d, z = pair(y, a + rotate(b + K2, 18) + c, mul);
    u64 e = at(s + 16) * mul, f = at(s + 24), g = (y + at(s + n - 32)) * mul, h = (z + at(s + n - 24)) * mul;
    return pair(rotate(e + f, 43) + rotate(g, 30) + h, e + rotate(f + a, 18) + g, mul);
  }
  u64 x = 81, y = 81 * K1 + 113, z = mix(y * K2 + 113) * K2, v0 = 0, v1 = 0, w0 = 0, w1 = 0, t;
  const uint8_t *end = s + (n - 1) / 64 * 64, *last = s + n - 64;
  x = x * K2 + at(s);
  do {
    x = rotate(x + y + v0 + at(s + 8), 37) * K1 ^ w1;
    y = rotate(y + v1 + at(s + 48), 42) * K1 + v0 + at(s + 40);
    z = rotate(z + w0, 33) * K1;
    a = v1 * K1, b = x + w0, c = z + w1, d = y + at(s + 16);
    weak(s, a, b, &v0, &v1);
    weak(s + 32, c, d, &w0, &w1);
    t = z, z = x, x = t;
    s += 64;
  } while (s != end);
  mul = K1 + ((z & 0xff) << 1);
  s = last;
  w0 += (n - 1) & 63;
  v0 += w0;
  w0 += v0;
  x = rotate(x + y + v0 + at(s + 8), 37) * mul ^ w1 * 9;
  y = rotate(y + v1 + at(s + 48), 42) * mul + v0 * 9 + at(s + 40);
  z = rotate(z + w0, 33) * mul;
  a = v1 * mul, b = x + w0, c = z + w1, d = y + at(s + 16);
  weak(s, a, b, &v0, &v1);
  weak(s + 32, c, d, &w0, &w1);
  t = z, z = x, x = t;
  return pair(pair(v0, w0, mul) + mix(y) * K0 + z, pair(v1, w1, mul) + x, mul);
}

static void sip_rounds(u64 *v, int count) {
  while (count--) {
    v[0] += v[1], v[2] += v[3];
    v[1] = rotate(v[1], 51) ^ v[0], v[3] = rotate(v[3], 48) ^ v[2];
    v[0] = rotate(v[0], 32);
    v[2] += v[1], v[0] += v[3];
    v[1] = rotate(v[1], 47) ^ v[2], v[3] = rotate(v[3], 43) ^ v[0];
    v[2] = rotate(v[2], 32);
  }
}

static u64 tail(const uint8_t *s, u64 n) {
  u64 word = 0;
  memcpy(&word, s, n & 7);
  return word;
}

/* SipHash-2-4. */
static u64 sip(const uint8_t *s, u64 n, u64 k0, u64 k1) {
  u64 v[4] = {k0 ^ 0x736f6d6570736575ULL, k1 ^ 0x646f72616e646f6dULL, k0 ^ 0x6c7967656e657261ULL, k1 ^ 0x7465646279746573ULL};
  for (u64 place = 0;; place += 8) {
    int whole = place + 8 <= n;
    u64 word = whole ? at(s + place) : tail(s + place, n) | n << 56;
    v[3] ^= word;
    sip_rounds(v, 2);
    v[0] ^= word;
    if (!whole) break;
  }
  v[2] ^= 0xff;
  sip_rounds(v, 4);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* TensorFlow's Hash64. */
static u64 plain(const uint8_t *s, u64 n) {
  const u64 mul = 0xc6a4a7935bd1e995ULL;
  u64 made = 0xdecafcaffeULL ^ n * mul, place = 0;
  for (; place + 8 <= n; place += 8) made = (made ^ mix(at(s + place) * mul) * mul) * mul;
  if (n & 7) made = (made ^ tail(s + place, n)) * mul;
  return mix(mix(made) * mul);
}

/* A `bytes` of CPython 3.8 to 3.13. */
typedef struct { int64_t references; const void *type; int64_t size; int64_t hash; uint8_t data[]; } Text;

/* The number of the first object that is no `bytes`; -1 where all are. */
int64_t first_other(const Text *const *items, int64_t count, const void *type) {
  for (int64_t i = 0; i < count; i++)
    if (items[i]->type != type) return i;
  return -1;
}

/* Whether an object has this size and these bytes. */
int looks_like(const Text *item, const uint8_t *data, int64_t size) { return item->size == size && !memcmp(item->data, data, size); }

/* Hashes of strings, modulo `buckets` where that is not 0. Gives the number of the first object that is none, or -1. */
int64_t hash_strings(int kind, const Text *const *items, int64_t count, const void *type, u64 k0, u64 k1, u64 buckets, u64 *made) {
  for (int64_t i = 0; i < count; i++) {
    if (items[i]->type != type) return i;
    const uint8_t *data = items[i]->data;
    u64 n = items[i]->size, hash = kind == 0 ? farm(data, n) : kind == 1 ? sip(data, n, k0, k1) : plain(data, n);
    made[i] = buckets ? hash % buckets : hash;
  }
  return -1;
}

/* Slots for keys, all of them different. `slots`, a power of two with room to spare, gets the number of a key + 1 where the search for it
   begins, or behind; 0 where nothing is. */
void fill_slots(const Text *const *keys, int64_t count, uint32_t *slots, u64 last_slot) {
  for (int64_t i = 0; i < count; i++) {
    u64 slot = farm(keys[i]->data, keys[i]->size) & last_slot;
    while (slots[slot]) slot = (slot + 1) & last_slot;
    slots[slot] = i + 1;
  }
}

/* All combinations of the values of each row, one of each column, the last changing fastest: their fingerprints modulo `buckets`, and
   (row, number in it) of each. starts[column][row] is the first value of a row, starts[column][rows] the end. */
static void cross_columns(int64_t columns, const u64 *const *values, const int64_t *const *starts, int64_t rows, u64 salt, u64 buckets,
                   int64_t *indices, u64 *made) {
  const u64 mul = 0xc6a4a7935bd1e995ULL;
  for (int64_t row = 0; row < rows; row++) {
    int64_t total = 1;
    for (int64_t c = 0; c < columns; c++) total *= starts[c][row + 1] - starts[c][row];
    for (int64_t i = 0; i < total; i++) {
      int64_t left = i, inner = total;
      u64 hash = salt;
      for (int64_t c = 0; c < columns; c++) {
        inner /= starts[c][row + 1] - starts[c][row];
        u64 value = values[c][starts[c][row] + left / inner];
        left %= inner;
        hash = ((hash ^ mul) ^ mix(value * mul) * mul) * mul;
        hash = mix(mix(hash) * mul);
      }
      *indices++ = row;
      *indices++ = i;
      *made++ = hash % buckets;
    }
  }
}

/* A message's bytes, from `p` on. */
typedef struct { const uint8_t *p, *end; } Bytes;

/* A string: where it lies, and its length. */
typedef struct { const uint8_t *p; int64_t n; } View;

static int varint(Bytes *in, u64 *value) {
  *value = 0;
  for (int shift = 0; shift < 70 && in->p < in->end; shift += 7) {
    uint8_t byte = *in->p++;
    if (shift < 64) *value |= (u64)(byte & 0x7f) << shift;
    if (byte < 0x80) return 1;
  }
  return 0;
}

/* The next field: its number and wire type, and what it holds: a part of the message, or the number of a varint. */
static int field(Bytes *in, u64 *tag, Bytes *inner, u64 *value) {
  u64 size;
  if (!varint(in, tag) || !(*tag >> 3)) return 0;
  switch (*tag & 7) {
    case 0: return varint(in, value);
    case 1: size = 8; break;
    case 2: if (!varint(in, &size)) return 0; break;
    case 5: size = 4; break;
    default: return 0;
  }
  if (size > (u64)(in->end - in->p)) return 0;
  inner->p = in->p;
  inner->end = in->p += size;
  return 1;
}

/* The values of a list; where `values` is given they are written there: floats, integers, or for bytes where each lies and its
   length. Gives how many there are, or -1 where the list is damaged. */
static int64_t read_list(Bytes list, int64_t kind, uint8_t *values) {
  int64_t total = 0;
  Bytes part;
  u64 tag, value;
  while (list.p < list.end) {
    if (!field(&list, &tag, &part, &value)) return -1;
    if (kind == 1 && tag == 10) {
      if (values) ((View *)values)[total].p = part.p, ((View *)values)[total].n = part.end - part.p;
      total++;
    } else if (kind == 2 && (tag == 10 || tag == 13)) {
      int64_t size = part.end - part.p;
      if (size & 3) return -1;
      if (values) memcpy(values + 4 * total, part.p, size);
      total += size / 4;
    } else if (kind == 3 && tag == 8) {
      if (values) ((int64_t *)values)[total] = (int64_t)value;
      total++;
    } else if (kind == 3 && tag == 10) {
      for (; part.p < part.end; total++) {
        if (!varint(&part, &value)) return -1;
        if (values) ((int64_t *)values)[total] = (int64_t)value;
      }
    }
  }
  return total;
}

/* Strings of a block, each behind its length in four bytes: gives their count; -1 where lengths do not fit the block, or they are more than
   `most`. With `made` they become objects there, by `make`, which may fail: -2. It is called with Python's lock. */
int64_t read_strings(const uint8_t *data, int64_t size, int64_t most, void **made, void *(*make)(const uint8_t *, int64_t)) {
  const uint8_t *end = data + size;
  int64_t count = 0;
  for (; data < end; count++) {
    if (count == most || end - data < 4 || (u64)(end - data - 4) < at32(data)) return -1;
    if (made && !(made[count] = make(data + 4, at32(data)))) return -2;
    data += 4 + at32(data);
  }
  return count;
}

/* A request of which the values are left out: its bytes, those that were kept, room for more, where values lie, and how many there are. */
typedef struct { const uint8_t *data; uint8_t *p, *end; View *values; int64_t count, most, infers; } Rest;

/* Adds bytes that no field begins with, and two numbers. */
static uint8_t *note(Rest *rest, u64 what, u64 number) {
  uint8_t *place = rest->p;
  if (rest->end - place < 17) return 0;
  place[0] = 0;
  memcpy(place + 1, &what, 8);
  memcpy(place + 9, &number, 8);
  rest->p += 17;
  return place + 9;
}

/* Keeps all of a message but the values of its tensors: of strings (field 8 in a tensor) how many follow each other, of others their bytes.
   Equal rests have the same fields in the same order, and values that differ at most. `deep`: messages around it. */
static int without_values(Bytes in, int deep, Rest *rest) {
  Bytes inner;
  u64 tag, value, texts = 0;
  while (in.p < in.end) {
    const uint8_t *begin = in.p;
    uint8_t *size;
    if (!field(&in, &tag, &inner, &value)) return 0;
    /* A number outside of a packed list is a value, too. And a tag or a length of ten bytes may be larger than 64 bits. */
    if ((tag & 7) == 2 ? inner.p - begin > 10 : deep == 2 && tag >> 3 >= (rest->infers ? 1 : 4)) return 0;
    int is_value = (tag & 7) == 2 && (deep == 2 ? rest->infers || tag >> 3 >= 4 : !deep && rest->infers && tag >> 3 == 7);
    int is_text = is_value && tag >> 3 == 8;
    if (is_value) {
      if (rest->count == rest->most) return 0;
      rest->values[rest->count].p = is_text ? inner.p : (const uint8_t *)(inner.p - rest->data);
      rest->values[rest->count++].n = inner.end - inner.p;
      texts += is_text;
    }
    if (is_text) continue;
    if (texts && !note(rest, 8, texts)) return 0;
    texts = 0;
    if (is_value) {
      if (!note(rest, tag, inner.end - inner.p)) return 0;
    } else if (deep < 2 && tag == (rest->infers ? 42 : 18)) {
      if (!(size = note(rest, tag, 0)) || !without_values(inner, deep + 1, rest)) return 0;
      value = rest->p - size;
      memcpy(size, &value, 8);
    } else {
      if (rest->end - rest->p < in.p - begin) return 0;
      memcpy(rest->p, begin, in.p - begin);
      rest->p += in.p - begin;
    }
  }
  return !texts || note(rest, 8, texts);
}

/* A PredictRequest, or a ModelInferRequest (`infers`), without the values of its inputs. Where these lie is written first, `most` of them
   at most, in their order: of a string the address, of others how far behind the beginning. Behind room for so many
   comes their number, and then the rest of the request, `room` bytes in all at most. Gives these bytes; -1 where the request is damaged or
   either has no room. */
int64_t take_values(int64_t infers, const uint8_t *data, int64_t size, View *values, int64_t most, int64_t room) {
  uint8_t *made = (uint8_t *)(values + most);
  if (room < 8) return -1;
  Rest rest = {data, made + 8, made + room, values, 0, most, infers};
  if (!without_values((Bytes){data, data + size}, 0, &rest)) return -1;
  memcpy(made, &rest.count, 8);
  return rest.p - made;
}

#include "host_steps.c"
