// Tests of attention with a cache, and of the formats of cached rows. The results of attention must
// equal those of plain loops within a tolerance.
#include <array>
#include <numeric>

#include "kernels_test.h"

namespace kernels_test {
namespace {

// ---- Rows of the cache ----

using Bytes = std::vector<uint8_t>;
using dlm::CacheType;

constexpr CacheType kCaches[] = {CacheType::fp32, CacheType::fp16, CacheType::int8};

// Rounds x to the nearest multiple of 2 ^ exponent, half to even; the result is exact.
double rounded_to(double x, int exponent) {
  return std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
}

double read_half(const uint8_t* from) {
  const int bits = from[0] | from[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction == 0 ? kInfinity : kNan)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 == 0 ? size : -size;
}

int64_t row_bytes(CacheType cache, int64_t D) {
  dlm::CachedAttention of_this_size{};
  of_this_size.cache = cache, of_this_size.head_size = D;
  return of_this_size.row_bytes();
}

// Reads stored rows [rows, D] as numbers.
std::vector<double> read_rows(CacheType cache, const Bytes& stored, int64_t D) {
  std::vector<double> all;
  for (auto at = stored.data(); at != stored.data() + stored.size(); at += row_bytes(cache, D))
    for (int64_t d = 0; d < D; ++d) {
      float one = 0;
      if (cache == CacheType::fp32) std::memcpy(&one, at + 4 * d, sizeof one);
      const auto byte = [&](int64_t i) { return static_cast<int8_t>(at[i]); };
      const double scale =
          byte(D + 1) == 127 ? kInfinity : std::ldexp(128 + byte(D), byte(D + 1) + 1);
      if (cache == CacheType::fp16)
        all.push_back(read_half(at + 2 * d));
      else
        all.push_back(cache == CacheType::fp32 ? double{one} : byte(d) * scale);
    }
  return all;
}

// Returns the values of rows [rows, D] after they were stored in a cache. fp16 rounds each number.
// INT8 stores codes. The scale of the codes is the smallest 8-bit scale that is at least amax /
// 127, where amax is the largest magnitude in the row.
std::vector<double> round_rows(CacheType cache, const Floats& x, int64_t D) {
  std::vector<double> all(x.begin(), x.end());
  for (size_t from = 0; from < x.size() && cache != CacheType::fp32;
       from += static_cast<size_t>(D)) {
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(from), last = first + D;
    float amax = 1e-30f;
    bool is_finite = true;
    for (auto one = first; one != last; ++one)
      amax = std::max(amax, static_cast<float>(std::abs(*one))), is_finite &= std::isfinite(*one);
    if (cache == CacheType::fp16) {
      for (auto one = first; one != last; ++one) {
        if (!std::isfinite(*one)) continue;
        const double near = rounded_to(*one, std::max(std::ilogb(*one == 0 ? 1 : *one), -14) - 10);
        *one = std::abs(near) < 65520 ? near : std::copysign(kInfinity, *one);
      }
      continue;
    }
    const double wanted = amax / 127.0f;
    int exponent = std::ilogb(wanted) - 7;
    if (wanted > std::ldexp(255, exponent)) ++exponent;
    const auto scale =
        static_cast<float>(std::ldexp(std::ceil(std::ldexp(wanted, -exponent)), exponent));
    for (auto one = first; one != last; ++one)
      *one = is_finite ? std::nearbyint(static_cast<float>(*one) / scale) * scale : double{kNan};
  }
  return all;
}

// Makes rows of NaN and of multiples of 2 ^ -5 below 4, which every cache stores exactly.
Bytes store_rows(CacheType cache, const Floats& x, int64_t D) {
  const auto size = static_cast<size_t>(D), bytes = static_cast<size_t>(row_bytes(cache, D));
  const size_t element = cache == CacheType::fp32 ? 4 : cache == CacheType::fp16 ? 2 : 1;
  Bytes stored(x.size() / size * bytes);
  for (size_t i = 0; i < x.size(); ++i) {
    uint8_t *const row = stored.data() + i / size * bytes, *const at = row + i % size * element;
    if (cache == CacheType::fp32) {
      std::memcpy(at, &x[i], sizeof x[i]);
    } else if (cache == CacheType::fp16) {
      const bool is_number = x[i] != 0 && !std::isnan(x[i]);
      const int exponent = is_number ? std::ilogb(x[i]) + 15 : 0;
      const int fraction =
          is_number ? static_cast<int>(std::ldexp(std::abs(x[i]), 25 - exponent)) - 1024 : 0;
      const int bits =
          std::isnan(x[i]) ? 0x7e00 : (std::signbit(x[i]) ? 0x8000 : 0) | exponent << 10 | fraction;
      at[0] = static_cast<uint8_t>(bits), at[1] = static_cast<uint8_t>(bits >> 8);
    } else {
      if (i % size == 0) row[size] = 0, row[size + 1] = static_cast<uint8_t>(-5 - 7 - 1);
      if (std::isnan(x[i])) std::memset(row, 0, size), row[size + 1] = 127;
      if (row[size + 1] != 127) at[0] = static_cast<uint8_t>(static_cast<int>(std::ldexp(x[i], 5)));
    }
  }
  return stored;
}

// ---- Attention ----

constexpr float kEpsilon = 1e-5f;

struct Attention {
  int64_t B, T, S, H, G, D;  // sizes; G is the number of key/value heads
  CacheType cache = CacheType::fp32;
  int64_t rotary_size = D, table_rows = 50, visible_block = 0, window = 0;
  bool has_drafts = false;  // table_rows, once or twice, was added to the positions of draft passes
  float own_scale = 0;      // 0: 1 / sqrt(D)
  Floats q, k, v, past_keys, past_values, cos, sin;  // past rows are multiples of 2 ^ -5 below 4
  Floats q_norm, k_norm;                             // empty: heads are not normalised
  std::vector<int64_t> positions;
  std::vector<dlm::Segment> segments;
  // The result of first_segments() for `segments`; set by pass().
  std::vector<int64_t> first_segments;
  Floats y, new_keys, new_values;
  Bytes stored_keys, stored_values, present_keys, present_values;

  Attention(Numbers& numbers, int64_t b, int64_t t, int64_t s, int64_t h, int64_t g, int64_t d)
      : B(b), T(t), S(s), H(h), G(g), D(d) {
    q = numbers.normals(B * T * H * D), k = numbers.normals(B * T * G * D),
    v = numbers.normals(B * T * G * D);
    past_keys = numbers.normals(B * G * S * D), past_values = numbers.normals(B * G * S * D);
    for (Floats* const past : {&past_keys, &past_values})
      for (float& one : *past)
        one = static_cast<float>(rounded_to(std::clamp(one, -3.9f, 3.9f), -5));
    for (int64_t i = 0; i < table_rows * D / 2; ++i) {
      const float angle = numbers.normal() * 3;
      cos.push_back(std::cos(angle)), sin.push_back(std::sin(angle));
    }
    for (int64_t i = 0; i < B * T; ++i) positions.push_back(numbers.below(table_rows));
    // Makes the softmax uneven: a few keys get nearly all the weight.
    for (float& one : q) one *= 2;
  }

  dlm::CachedAttention pass() {
    y.assign(q.size(), 12345.0f), new_keys.assign(k.size(), 12345.0f),
        new_values.assign(v.size(), 12345.0f);
    stored_keys = store_rows(cache, past_keys, D),
    stored_values = store_rows(cache, past_values, D);
    present_keys.assign(static_cast<size_t>(B * G * T * row_bytes(cache, D)), 99),
        present_values = present_keys;
    const bool is_fp32 = cache == CacheType::fp32;
    first_segments = dlm::first_segments(segments.data(), static_cast<int64_t>(segments.size()));
    return {cache,
            q.data(),
            k.data(),
            v.data(),
            stored_keys.data(),
            stored_values.data(),
            positions.data(),
            cos.data(),
            sin.data(),
            B,
            T,
            S,
            H,
            G,
            D,
            rotary_size,
            table_rows,
            visible_block,
            window,
            has_drafts,
            segments.data(),
            static_cast<int64_t>(segments.size()),
            first_segments.data(),
            static_cast<int64_t>(first_segments.size()) - 1,
            y.data(),
            new_keys.data(),
            new_values.data(),
            is_fp32 ? static_cast<void*>(new_keys.data()) : present_keys.data(),
            is_fp32 ? static_cast<void*>(new_values.data()) : present_values.data(),
            q_norm.empty() ? nullptr : q_norm.data(),
            k_norm.empty() ? nullptr : k_norm.data(),
            kEpsilon,
            scale()};
  }
  void run(const dlm::Kernels& kernels, dlm::Parallel& parallel) {
    kernels.attention(pass(), parallel);
  }
  // Like run(), but over past rows that another pass has stored.
  void run_over(const Bytes& keys, const Bytes& values, const dlm::Kernels& kernels,
                dlm::Parallel& parallel) {
    dlm::CachedAttention a = pass();
    a.past_keys = keys.data(), a.past_values = values.data();
    kernels.attention(a, parallel);
  }
  // Returns the new rows [B, G, T] in the format of the cache.
  Bytes kept(bool is_key) const {
    if (cache != CacheType::fp32) return is_key ? present_keys : present_values;
    const Floats& rows = is_key ? new_keys : new_values;
    Bytes bytes(rows.size() * sizeof(float));
    std::memcpy(bytes.data(), rows.data(), bytes.size());
    return bytes;
  }
  // True if queries see new rows as the cache stores them.
  bool reads_rounded() const { return visible_block != 0 && cache != CacheType::fp32; }

  // Returns the head of x [B, T, heads, D] at [b, t, head], normalised and rotated.
  std::vector<double> turned(const Floats& x, const Floats& norm, int64_t heads, int64_t b,
                             int64_t t, int64_t head) const {
    const float* const from = x.data() + ((b * T + t) * heads + head) * D;
    const int64_t half = rotary_size / 2,
                  at = positions[static_cast<size_t>(b * T + t)] % table_rows * half;
    std::vector<double> row(from, from + D);
    double squares = 0;
    for (const double one : row) squares += one * one;
    for (size_t d = 0; d < norm.size(); ++d)
      row[d] *= norm[d] / std::sqrt(squares / static_cast<double>(D) + kEpsilon);
    std::vector<double> out = row;
    for (int64_t d = 0; d < half; ++d) {
      const double c = cos[static_cast<size_t>(at + d)], s = sin[static_cast<size_t>(at + d)];
      const double first = row[static_cast<size_t>(d)], second = row[static_cast<size_t>(half + d)];
      out[static_cast<size_t>(d)] = first * c - second * s;
      out[static_cast<size_t>(half + d)] = second * c + first * s;
    }
    return out;
  }

  std::vector<double> expected() const {
    std::vector<double> all;
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < H; ++h) {
          const std::vector<double> one = attend(b, t, h);
          all.insert(all.end(), one.begin(), one.end());
        }
    return all;
  }

  float scale() const { return own_scale != 0 ? own_scale : 1 / std::sqrt(static_cast<float>(D)); }

  // Returns true if the query of token t sees the cached row j. With drafts and a window, the rows
  // belong to the positions before the first token.
  bool sees_past(int64_t t, int64_t j) const {
    if (window == 0 || !has_drafts) return true;
    const bool is_draft = positions[0] >= table_rows;
    const int64_t first = positions[0] % table_rows;
    return first + (is_draft ? 0 : t) - (first - S + j) <= window;
  }

  // Returns true if the query of token t sees the key of token j.
  bool sees(int64_t b, int64_t t, int64_t j) const {
    const auto position = [&](int64_t token) {
      return positions[static_cast<size_t>(b * T + token)];
    };
    if (has_drafts && position(t) >= table_rows) return true;
    if (window != 0 && has_drafts) return j <= t && t - j <= window;
    if (window != 0) return std::abs(position(j) - position(t)) <= window;
    return visible_block == 0 || position(j) / visible_block <= position(t) / visible_block;
  }

  // Returns a pass that computes only this segment.
  Attention alone(const dlm::Segment& part) const {
    Attention one = *this;
    one.segments.clear();
    one.T = part.tokens, one.S = part.cached;
    const auto cut = [&](const Floats& all, int64_t heads) {
      return Floats(all.data() + part.first * heads * D,
                    all.data() + (part.first + part.tokens) * heads * D);
    };
    one.q = cut(q, H), one.k = cut(k, G), one.v = cut(v, G);
    one.positions.assign(positions.begin() + part.first,
                         positions.begin() + part.first + part.tokens);
    const auto past = [&](const Floats& all) {
      Floats rows;
      for (int64_t g = 0; g < G; ++g)
        rows.insert(rows.end(), all.data() + (g * S + part.start) * D,
                    all.data() + (g * S + part.start + part.cached) * D);
      return rows;
    };
    one.past_keys = past(past_keys), one.past_values = past(past_values);
    return one;
  }

 private:
  std::vector<double> attend(int64_t b, int64_t t, int64_t h) const {
    const int64_t g = h / (H / G), first = (b * G + g) * S * D;
    const std::vector<double> query = turned(q, q_norm, H, b, t, h);
    // Returns a new row that the kernel rounded.
    const auto rounded = [&](const Floats& rows, int64_t token) {
      const float* const from = rows.data() + ((b * G + g) * T + token) * D;
      return std::vector<double>(from, from + D);
    };
    std::vector<double> weights;
    for (int64_t j = 0; j < S + T; ++j) {
      if (j < S ? !sees_past(t, j) : !sees(b, t, j - S)) {
        weights.push_back(-kInfinity);
        continue;
      }
      const float* const past = past_keys.data() + first + j * D;
      const std::vector<double> key = j < S             ? std::vector<double>(past, past + D)
                                      : reads_rounded() ? rounded(new_keys, j - S)
                                                        : turned(k, k_norm, G, b, j - S, g);
      double score = 0;
      for (size_t d = 0; d < key.size(); ++d) score += query[d] * key[d];
      weights.push_back(score * scale());
    }
    double largest = weights[0], total = 0;
    for (const double weight : weights) largest = std::max(largest, weight);
    for (double& weight : weights) total += weight = std::exp(weight - largest);
    std::vector<double> out(static_cast<size_t>(D));
    for (int64_t j = 0; j < S + T; ++j) {
      const float* const own = v.data() + ((b * T + j - S) * G + g) * D;
      const float* const past = past_values.data() + first + j * D;
      const std::vector<double> value = j < S             ? std::vector<double>(past, past + D)
                                        : reads_rounded() ? rounded(new_values, j - S)
                                                          : std::vector<double>(own, own + D);
      const double weight = weights[static_cast<size_t>(j)] / total;
      for (int64_t d = 0; d < D && weight != 0; ++d)
        out[static_cast<size_t>(d)] += weight * value[static_cast<size_t>(d)];
    }
    return out;
  }
};

// Attention scores are sums of D products. Their absolute error is about sqrt(D) * 2^-24 times the
// score, which is at most 100 here. The relative error of a softmax weight is the absolute error of
// its score. All other errors are smaller.
constexpr double kAttentionTolerance = 5e-5;

void test_shapes(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(5);
  InOrder in_order;
  bool is_normed = false;
  const auto check = [&](CacheType cache, int64_t B, int64_t T, int64_t S, int64_t H, int64_t G,
                         int64_t D) {
    tally.about = std::string(kernels.name) + " " + std::to_string(static_cast<int>(cache));
    if (is_normed) tally.about += " normed";
    for (const int64_t one : {B, T, S, H, G, D}) tally.about += " " + std::to_string(one);
    Attention attention(numbers, B, T, S, H, G, D);
    attention.cache = cache;
    if (is_normed) attention.q_norm = numbers.normals(D), attention.k_norm = numbers.normals(D);
    attention.run(kernels, in_order);
    CHECK(distance(attention.y, attention.expected(), 1) < kAttentionTolerance);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t g = 0; g < G; ++g)
        for (int64_t t = 0; t < T; ++t) {
          const int64_t from = ((b * T + t) * G + g) * D, to = ((b * G + g) * T + t) * D;
          const auto cut = [D](const Floats& all, int64_t at) {
            return Floats(all.data() + at, all.data() + at + D);
          };
          CHECK(same_bits(cut(attention.new_values, to), cut(attention.v, from)));
          CHECK(distance(cut(attention.new_keys, to),
                         attention.turned(attention.k, attention.k_norm, G, b, t, g), 1) < 2e-6);
        }
    if (cache == CacheType::fp32) return;
    CHECK(read_rows(cache, attention.present_keys, D) == round_rows(cache, attention.new_keys, D));
    CHECK(read_rows(cache, attention.present_values, D) ==
          round_rows(cache, attention.new_values, D));
  };
  for (const CacheType cache : kCaches) {
    for (const int64_t T : {1, 5, 8, 16, 17, 33, 65})
      for (const int64_t S : {0, 7, 131}) check(cache, 1, T, S, 2, 1, 20);
    for (const int64_t D : {2, 10, 32, 36, 126, 512}) check(cache, 1, 5, 9, 2, 2, D);
    for (const int64_t G : {1, 2, 3, 6}) check(cache, 3, 9, 5, 6, G, 12);
    check(cache, 2, 33, 70, 4, 2, 64);
    check(cache, 1, 3, 70, 1, 1, 512);
    check(cache, 1, 65, 70, 142, 2, 6);  // a task has several tiles of queries
    is_normed = true;
    for (const int64_t D : {2, 36, 510}) check(cache, 2, 9, 5, 4, 2, D);
    is_normed = false;
  }
}

// With a window, a query sees only the keys that are at most `window` positions away from its own
// position.
void test_queries_see_a_window(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(12);
  InOrder in_order;
  for (const CacheType cache : kCaches)
    for (const int64_t T : {1, 16, 70})
      for (const int64_t window : {1, 7, 64}) {
        tally.about = std::string(kernels.name) + " window " + std::to_string(window) + " of " +
                      std::to_string(T);
        Attention attention(numbers, 1, T, 0, 4, 2, 20);
        attention.cache = cache, attention.window = window, attention.table_rows = T;
        attention.cos = numbers.normals(T * 10), attention.sin = numbers.normals(T * 10);
        std::iota(attention.positions.begin(), attention.positions.end(), 0);
        attention.run(kernels, in_order);
        CHECK(distance(attention.y, attention.expected(), 1) < kAttentionTolerance);
      }
}

// A prompt gives the same bits in one pass and in several passes that read the rows of earlier
// passes. The cached rows may be anywhere in the cache. This holds only if each pass has more
// queries per key/value head than a vector has lanes.
void test_prompts_give_the_same_bits_in_several_passes(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(11);
  InOrder in_order;
  constexpr int64_t kBlock = 8, kHeads = 8, kGroups = 2, kLeast = 24;
  for (int round = 0; round < 12; ++round) {
    const int64_t D = std::array<int64_t, 4>{20, 64, 128, 256}[static_cast<size_t>(round % 4)];
    const int64_t N = kBlock * (6 + numbers.below(30));
    const CacheType cache = kCaches[static_cast<size_t>(round / 4 % 3)];
    tally.about = std::string(kernels.name) + " " + std::to_string(static_cast<int>(cache)) + " " +
                  std::to_string(D) + " " + std::to_string(N);
    Attention whole(numbers, 1, N, 0, kHeads, kGroups, D);
    whole.cache = cache, whole.visible_block = kBlock, whole.table_rows = N;
    whole.cos = numbers.normals(N * D / 2), whole.sin = numbers.normals(N * D / 2);
    std::iota(whole.positions.begin(), whole.positions.end(), 0);
    whole.run(kernels, in_order);
    const Bytes stored[] = {whole.kept(false), whole.kept(true)};
    const int64_t bytes = row_bytes(cache, D);
    for (int64_t first = 0, end; first < N; first = end) {
      end = std::min(N, first + kLeast + kBlock * numbers.below(8));
      if (N - end < kLeast) end = N;
      Attention part = whole.alone({0, 0, first, end - first});
      part.S = first;
      // Row r of a head is at places[r] in the cache. Rows are contiguous within pages of 16 rows.
      std::vector<int64_t> starts;
      for (int64_t page = 0; page * 16 < first; ++page) starts.push_back(page * 16);
      const bool is_mixed = numbers.below(2) == 0;
      if (is_mixed) std::reverse(starts.begin(), starts.end());
      const int64_t room = static_cast<int64_t>(starts.size()) * 16;
      part.S = room;
      Bytes past[2];
      past[0].resize(static_cast<size_t>(kGroups * room * bytes)), past[1] = past[0];
      part.past_keys.clear(), part.past_values.clear();
      for (int64_t page = 0; page * 16 < first; ++page) {
        const int64_t rows = std::min<int64_t>(16, first - page * 16);
        part.segments.push_back({starts[static_cast<size_t>(page)], rows, 0, end - first});
        for (int64_t g = 0; g < kGroups; ++g)
          for (const size_t kind : {0, 1})
            std::copy_n(stored[kind].data() + (g * N + page * 16) * bytes, rows * bytes,
                        past[kind].data() + (g * room + starts[static_cast<size_t>(page)]) * bytes);
      }
      if (part.segments.empty()) part.segments.push_back({0, 0, 0, end - first});
      part.run_over(past[1], past[0], kernels, in_order);
      CHECK(same_bits(
          part.y, Floats(whole.y.data() + first * kHeads * D, whole.y.data() + end * kHeads * D)));
    }
  }
}

// Tests blocks of any length. The positions are consecutive from any start, or in any order with
// some positions missing. The rotation applies only to a part of each head. Later blocks must not
// change the bits of the results for a block.
void test_queries_see_blocks_up_to_their_own(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(15);
  InOrder in_order;
  const auto check = [&](int64_t n, bool is_shuffled, int64_t T, int64_t S, int64_t H, int64_t G,
                         int64_t D) {
    tally.about = std::string(kernels.name) + ", blocks of";
    for (const int64_t one : {n, int64_t{is_shuffled}, T, S, H, G, D})
      tally.about += " " + std::to_string(one);
    Attention attention(numbers, 2, T, S, H, G, D);
    attention.visible_block = n;
    attention.rotary_size = D / 4 * 2;
    const int64_t first = numbers.below(attention.table_rows - T + 1);
    std::vector<int64_t> order(static_cast<size_t>(attention.table_rows));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    for (size_t i = order.size(); is_shuffled && i-- > 1;)
      std::swap(order[i], order[static_cast<size_t>(numbers.below(static_cast<int64_t>(i) + 1))]);
    for (int64_t i = 0; i < 2 * T; ++i)
      attention.positions[static_cast<size_t>(i)] = order[static_cast<size_t>(first + i % T)];
    if (n == attention.table_rows)  // the positions contain the numbers of blocks
      for (int64_t& position : attention.positions) position += numbers.below(4) * n;
    for (const CacheType cache : kCaches) {
      attention.cache = cache;
      attention.run(kernels, in_order);
      CHECK(distance(attention.y, attention.expected(), 1) < kAttentionTolerance);
      if (cache != CacheType::fp32) {
        const auto wide = [](const Floats& x) { return std::vector<double>(x.begin(), x.end()); };
        CHECK(read_rows(cache, attention.present_keys, D) == wide(attention.new_keys));
        CHECK(read_rows(cache, attention.present_values, D) == wide(attention.new_values));
        CHECK(wide(attention.new_values) != wide(attention.v));
      }
      Attention other = attention;
      const int64_t changed = numbers.below(T);
      for (int64_t i = changed * G * D; i < (changed + 1) * G * D; ++i) {
        other.k[static_cast<size_t>(i)] += 3;
        other.v[static_cast<size_t>(i)] += 3;
      }
      other.run(kernels, in_order);
      for (int64_t t = 0; t < 2 * T; ++t) {
        const auto row = [&](const Floats& y) {
          return Floats(y.data() + t * H * D, y.data() + (t + 1) * H * D);
        };
        CHECK((t < T && attention.sees(0, t, changed)) ||
              same_bits(row(attention.y), row(other.y)));
      }
    }
  };
  for (const int64_t n : {1, 5, 32, 50, INT32_MAX})
    for (const bool is_shuffled : {false, true}) {
      for (const int64_t T : {1, 17, 50}) check(n, is_shuffled, T, 3, 2, 1, 20);
      check(n, is_shuffled, 50, 0, 4, 4, 8);
    }
  check(5, true, 50, 3, 100, 2, 6);  // a task has several tiles of queries
}

// With drafts and a window, a causal query sees the keys of at most `window` positions before its
// own. All drafted tokens see the same cached rows, and each other. The cached rows of a request
// may be in several segments.
void test_causal_and_drafted_queries_see_a_window(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(23);
  InOrder in_order;
  constexpr int64_t kRows = 200, kSize = 20;
  for (const CacheType cache : kCaches)
    for (const int64_t T : {1, 40})
      for (const int64_t S : {0, 70})
        for (const int64_t window : {7, 64})
          for (int64_t times = 0; times <= 2; ++times) {
            tally.about = std::string(kernels.name) + " window";
            for (const int64_t one : {T, S, window, times})
              tally.about += " " + std::to_string(one);
            Attention attention(numbers, 1, T, S, 4, 2, kSize);
            attention.cache = cache, attention.window = window, attention.table_rows = kRows;
            attention.visible_block = 1, attention.has_drafts = true, attention.own_scale = 0.3f;
            attention.cos = numbers.normals(kRows * kSize / 2);
            attention.sin = numbers.normals(kRows * kSize / 2);
            const int64_t first = S + numbers.below(kRows - S - T);
            std::iota(attention.positions.begin(), attention.positions.end(),
                      first + times * kRows);
            attention.run(kernels, in_order);
            CHECK(distance(attention.y, attention.expected(), 1) < kAttentionTolerance);
            if (S == 0) continue;
            const Floats whole = attention.y;
            const int64_t cut = numbers.below(S);
            attention.segments = {{0, cut, 0, T}, {cut, S - cut, 0, T}};
            attention.run(kernels, in_order);
            CHECK(distance(attention.y, std::vector<double>(whole.begin(), whole.end()), 1) <
                  kAttentionTolerance);
          }
}

// If the cache does not round keys and values, a draft pass gives the same bits as a pass with full
// attention. Other passes of a denoiser with draft passes give the same bits as causal passes.
void test_draft_passes_are_full_attention(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(17);
  InOrder in_order;
  tally.about = kernels.name;
  for (const int64_t T : {1, 4, 32, 50})
    for (const CacheType cache : kCaches) {
      Attention full(numbers, 1, T, 70, 4, 2, 16);
      full.cache = cache;
      Attention causal = full, draft = full;
      causal.visible_block = draft.visible_block = 1;
      full.run(kernels, in_order);
      causal.run(kernels, in_order);
      draft.has_drafts = true;
      draft.run(kernels, in_order);
      CHECK(same_bits(causal.y, draft.y));
      // The positions of a draft pass have table_rows added once, or twice if the pass uses
      // low-rank updates.
      for (int times = 1; times <= 2; ++times) {
        for (int64_t& position : draft.positions) position += draft.table_rows;
        draft.run(kernels, in_order);
        if (cache == CacheType::fp32)
          CHECK(same_bits(full.y, draft.y) && same_bits(full.new_keys, draft.new_keys));
        CHECK(distance(draft.y, draft.expected(), 1) < kAttentionTolerance);
      }
    }
}

// Tests rows of any magnitude, up to the limits of scales and codes. A number that is NaN or
// infinite must affect only its own row.
void test_rows_are_stored_as_plain_loops_store_them(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(14);
  InOrder in_order;
  for (const CacheType cache : {CacheType::fp16, CacheType::int8})
    for (const int64_t D : {2, 20, 130})
      for (const float size : {0.0f, 1e-38f, 1e-31f, 1e-30f, 1e-7f, 6.1e-5f, 1.0f, 127.0f, 255.0f,
                               65519.0f, 65520.0f, 3.4e38f})
        for (const float bad : {0.0f, kNan, -kNan, kInfinity, -kInfinity}) {
          tally.about = std::string(kernels.name) + ", rows of " + std::to_string(D) + " up to " +
                        std::to_string(size);
          Attention attention(numbers, 1, 40, 0, 1, 1, D);
          attention.cache = cache;
          for (size_t i = 0; i < attention.v.size(); ++i) {
            const float part = std::clamp(attention.v[i] / 3, -1.0f, 1.0f);
            // Every fourth number is exactly in the middle between two codes.
            attention.v[i] = size * (i % 4 == 0 ? std::nearbyint(part * 254) / 254 : part);
          }
          for (int64_t t = 0; t < 40; ++t)
            attention.v[static_cast<size_t>(t * D + t % D)] = t % 2 == 0 ? size : -size;
          if (bad != 0) attention.v[static_cast<size_t>(13 * D + 1)] = bad;
          attention.run(kernels, in_order);
          const std::vector<double> found = read_rows(cache, attention.present_values, D);
          const std::vector<double> expected = round_rows(cache, attention.v, D);
          for (size_t i = 0; i < found.size(); ++i)
            CHECK(found[i] == expected[i] || (std::isnan(found[i]) && std::isnan(expected[i])));
        }
}

void test_nan_stays_where_it_belongs(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(6);
  InOrder in_order;
  for (const CacheType cache : kCaches)
    for (const int64_t T : {1, 3, 40}) {
      const int64_t B = 2, S = 70, H = 4, G = 2, D = 12;
      // In an INT8 cache, one NaN makes the whole row NaN.
      const bool by_rows = cache == CacheType::int8;
      tally.about = std::string(kernels.name) + ", " + std::to_string(T) + " tokens";
      const auto check = [&](Attention& attention, auto is_bad) {
        attention.cache = cache;
        attention.run(kernels, in_order);
        const std::vector<double> expected = attention.expected();
        for (int64_t i = 0; i < B * T * H * D; ++i) {
          const auto at = static_cast<size_t>(i);
          CHECK(std::isnan(attention.y[at]) ==
                is_bad(i / D / H / T, i / D / H % T, i / D % H, i % D));
          CHECK(std::isnan(attention.y[at]) ||
                std::abs(attention.y[at] - expected[at]) < kAttentionTolerance);
        }
      };
      Attention query(numbers, B, T, S, H, G, D), key = query, cached = query, value = query;
      query.q[static_cast<size_t>(((B - 1) * T * H + (T - 1) * H + 1) * D)] = kNan;
      check(query, [&](int64_t b, int64_t t, int64_t h, int64_t) {
        return b == B - 1 && t == T - 1 && h == 1;
      });
      key.k[static_cast<size_t>((T - 1) * G * D)] = kNan;
      check(key, [&](int64_t b, int64_t, int64_t h, int64_t) { return b == 0 && h / 2 == 0; });
      cached.past_keys[static_cast<size_t>((G + 1) * S * D + 66 * D + 3)] = kNan;
      check(cached, [&](int64_t b, int64_t, int64_t h, int64_t) { return b == 1 && h / 2 == 1; });
      value.past_values[static_cast<size_t>(G * S * D + 3 * D + 7)] = kNan;
      check(value, [&](int64_t b, int64_t, int64_t h, int64_t d) {
        return b == 1 && h / 2 == 0 && (by_rows || d == 7);
      });
    }
}

// A pass over several requests, whose cached rows may be anywhere, gives the same bits as separate
// passes.
void test_segments_are_passes_of_their_own(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(16);
  InOrder in_order;
  const std::vector<std::vector<dlm::Segment>> all = {
      {{0, 0, 0, 33}, {0, 0, 33, 1}, {0, 0, 34, 7}},
      {{60, 11, 0, 4}, {3, 40, 4, 32}, {0, 0, 36, 5}},
      {{0, 71, 0, 41}},
      // Two segments may refer to the same cached rows.
      {{0, 20, 0, 1}, {20, 20, 1, 1}, {10, 30, 2, 39}},
  };
  for (const CacheType cache : kCaches)
    for (const int64_t visible_block : {0, 5})
      for (const std::vector<dlm::Segment>& segments : all)
        for (const int64_t G : {1, 2}) {
          tally.about = std::string(kernels.name) + " " + std::to_string(static_cast<int>(cache)) +
                        " segments";
          const int64_t T = segments.back().first + segments.back().tokens, D = 20;
          Attention attention(numbers, 1, T, 71, 4, G, D);
          attention.cache = cache, attention.visible_block = visible_block,
          attention.segments = segments;
          CHECK(attention.pass().has_good_segments());
          attention.run(kernels, in_order);
          for (const dlm::Segment& part : segments) {
            Attention one = attention.alone(part);
            one.run(kernels, in_order);
            const Floats own(attention.y.data() + part.first * 4 * D,
                             attention.y.data() + (part.first + part.tokens) * 4 * D);
            CHECK(same_bits(own, one.y));
            for (int64_t g = 0; g < G; ++g) {
              const auto rows = [&](const Attention& of, const Floats& kept, int64_t first) {
                const float* const at = kept.data() + (g * of.T + first) * D;
                return Floats(at, at + part.tokens * D);
              };
              CHECK(same_bits(rows(attention, attention.new_keys, part.first),
                              rows(one, one.new_keys, 0)));
              CHECK(same_bits(rows(attention, attention.new_values, part.first),
                              rows(one, one.new_values, 0)));
            }
          }
          check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
            attention.run(kernels, parallel);
            return std::vector<Floats>{attention.y, attention.new_keys, attention.new_values};
          });
        }
}

}  // namespace

void test_positions_outside_the_tables_are_seen(Tally& tally) {
  Numbers numbers(7);
  tally.about = "tables";
  Attention attention(numbers, 2, 3, 0, 1, 1, 2);
  CHECK(attention.pass().is_in_table());
  for (const int64_t position : {int64_t{-1}, attention.table_rows, INT64_MIN, INT64_MAX}) {
    Attention other = attention;
    other.positions.back() = position;
    CHECK(!other.pass().is_in_table());
  }
  attention.has_drafts = true, attention.visible_block = 1;
  attention.positions.back() = 3 * attention.table_rows - 1;
  CHECK(attention.pass().is_in_table());
  attention.positions.back() = 3 * attention.table_rows;
  CHECK(!attention.pass().is_in_table());
}

void test_segments_that_lie_are_seen(Tally& tally) {
  Numbers numbers(8);
  tally.about = "segments";
  Attention attention(numbers, 1, 9, 20, 1, 1, 2);
  attention.segments = {{0, 20, 0, 4}, {5, 0, 4, 5}};
  CHECK(attention.pass().has_good_segments());
  // A request may have several segments.
  attention.segments = {{0, 5, 0, 4}, {10, 3, 0, 4}, {5, 0, 4, 5}, {19, 1, 4, 5}};
  CHECK(attention.pass().has_good_segments());
  CHECK(attention.first_segments == std::vector<int64_t>({0, 2, 4}));
  const std::vector<std::vector<dlm::Segment>> lies = {{{0, 21, 0, 9}},
                                                       {{1, 20, 0, 9}},
                                                       {{-1, 3, 0, 9}},
                                                       {{0, -1, 0, 9}},
                                                       {{0, 0, 0, 8}},
                                                       {{0, 0, 0, 10}},
                                                       {{0, 0, 1, 8}},
                                                       {{0, 0, 0, 0}},
                                                       {{0, 0, 0, 9}, {0, 0, 9, 0}},
                                                       {{0, 5, 0, 4}, {10, 3, 0, 5}, {0, 0, 5, 4}},
                                                       {{0, 5, 0, 9}, {19, 3, 0, 9}},
                                                       {{0, 0, 0, 5}, {0, 0, 4, 5}},
                                                       {{0, 0, 0, INT64_MAX}},
                                                       {{INT64_MAX, 1, 0, 9}},
                                                       {{1, INT64_MAX, 0, 9}}};
  for (const std::vector<dlm::Segment>& segments : lies) {
    attention.segments = segments;
    CHECK(!attention.pass().has_good_segments());
  }
  Attention two(numbers, 2, 9, 20, 1, 1, 2);
  two.segments = {{0, 20, 0, 9}};
  CHECK(!two.pass().has_good_segments());
}

void test_attention(Tally& tally, const dlm::Kernels& kernels) {
  test_segments_are_passes_of_their_own(tally, kernels);
  test_shapes(tally, kernels);
  test_queries_see_blocks_up_to_their_own(tally, kernels);
  test_queries_see_a_window(tally, kernels);
  test_prompts_give_the_same_bits_in_several_passes(tally, kernels);
  test_draft_passes_are_full_attention(tally, kernels);
  test_causal_and_drafted_queries_see_a_window(tally, kernels);
  test_rows_are_stored_as_plain_loops_store_them(tally, kernels);
  test_nan_stays_where_it_belongs(tally, kernels);
}

}  // namespace kernels_test
