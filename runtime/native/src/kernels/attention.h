// The attention kernel. Each new token attends to cached rows and to new rows.
#pragma once

#include "kernels/cache_dtypes.h"
#include "kernels/norm.h"

namespace {

constexpr float kLowest = -3.4028235e38f;
// The smallest number of tasks with which all threads get nearly the same amount of work.
constexpr int64_t kEnoughTasks = 128;

// Prepares x [D], one head of a query or key. If `weight` is not NULL, first normalises x with
// RMSNorm. Then rotates the first rotary_size numbers of x (rotate-half), by the angles whose
// cosines and sines are in a.cos and a.sin.
inline void norm_and_turn(const dlm::CachedAttention& a, const float* x, const float* weight,
                          int64_t position, float* out) {
  alignas(64) float normed[dlm::kLargestHeadSize];
  if (weight != nullptr) {
    norm_row(x, weight, a.head_size, a.epsilon, normed);
    x = normed;
  }
  const int64_t half = a.rotary_size / 2;
  const int64_t row = a.table_row(position) * half;
  const float *const cos = a.cos + row, *const sin = a.sin + row;
  int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const F c = simd::load(cos + d), s = simd::load(sin + d), first = simd::load(x + d),
            second = simd::load(x + half + d);
    simd::store(out + d, first * c - second * s);
    simd::store(out + half + d, second * c + first * s);
  }
  for (; d < half; ++d) {
    const float first = x[d], second = x[half + d];
    out[d] = first * cos[d] - second * sin[d];
    out[half + d] = second * cos[d] + first * sin[d];
  }
  for (d = 2 * half; d < a.head_size; ++d) out[d] = x[d];
}

// Computes the attention of one tile of queries. A tile consists of kQueries queries in kVectors
// vectors, one query per lane. After each group of keys, the softmax is updated (online softmax;
// Milakov and Gimelshein, arXiv:1805.02867). So only the attention scores of one group are in
// memory at a time.
template <int kVectors>
class Softmax {
 public:
  static constexpr int kQueries = kVectors * kLanes;
  // The number of keys whose dot products are computed in parallel. This hides the latency of
  // multiply-add instructions.
  static constexpr int kBlock = kVectors == 1 ? 8 : simd::kKeyBlock;
  // The number of keys whose attention scores are stored at a time. These keys and their values
  // must fit into the first-level cache. With few queries, memory bandwidth limits the speed, so
  // the prefetched keys and values must fit as well.
  static constexpr int kKeys = kVectors == 1 ? 16 : 36 / kBlock * kBlock;

  // `scores` points to scratch memory for kKeys * kQueries floats, which several tiles may share.
  // `queries` and `sums` point to scratch memory for head_size * kQueries floats each.
  void start(int64_t head_size, float* scores, float* queries, float* sums) {
    head_size_ = head_size, scores_ = scores, queries_ = queries, sums_ = sums;
    for (int64_t i = 0; i < head_size * kQueries; i += kLanes) simd::store(sums_ + i, simd::zero());
    for (int v = 0; v < kVectors; ++v)
      largest_[v] = simd::set(-__builtin_inff()), total_[v] = simd::zero();
  }

  // Stores one query [D] in the given lane, multiplied by `scale`.
  void set_query(int64_t lane, const float* query, float scale) {
    for (int64_t d = 0; d < head_size_; ++d) queries_[d * kQueries + lane] = query[d] * scale;
  }

  // Sets the first and the last position that each lane's query sees. add_seen ignores keys at all
  // other positions.
  void set_seen(const int32_t* first_seen, const int32_t* last_seen) {
    all_see_ = any_sees_ = {first_seen[0], last_seen[0]};
    for (int lane = 1; lane < kQueries; ++lane) {
      const Limits own{first_seen[lane], last_seen[lane]};
      if (own.first > all_see_.first) all_see_.first = own.first;
      if (own.last < all_see_.last) all_see_.last = own.last;
      if (own.first < any_sees_.first) any_sees_.first = own.first;
      if (own.last > any_sees_.last) any_sees_.last = own.last;
    }
    for (int v = 0; v < kVectors; ++v) {
      first_seen_[v] = simd::iload(first_seen + v * kLanes);
      last_seen_[v] = simd::iload(last_seen + v * kLanes);
      // The initial maximum is finite, because a lane may see none of the first keys. If the
      // initial maximum were -inf, the code would compute -inf minus -inf, which is NaN.
      largest_[v] = simd::set(kLowest);
    }
  }

  // Computes the attention to `count` keys, and adds their values to the result. `count` is at most
  // kKeys. `keys` and `values` are [count, D]. Calls `between` after it has read all keys, and
  // before it reads the values. While it reads the keys, prefetches `next_values`. While it reads
  // the values, prefetches `next_keys`.
  template <class Between>
  void add(const float* keys, const float* values, int64_t count, const void* next_values,
           const void* next_keys, Between between) {
    score<false>(keys, nullptr, count, Prefetched{next_values});
    between();
    weigh(values, count, Prefetched{next_keys});
  }

  // Like add(), for keys and values that are in the processor's caches. Prefetches nothing.
  void add_recent(const float* keys, const float* values, int64_t count) {
    score<false>(keys, nullptr, count, Nothing{});
    weigh(values, count, Nothing{});
  }

  // Adds the keys and values of the positions in `positions` [count]. `count` is at most kKeys, and
  // the positions may be in any order. Skips the keys at the start and at the end that no lane
  // sees.
  void add_seen(const float* keys, const float* values, const int64_t* positions, int64_t count) {
    int64_t first = 0, end = count;
    while (end > 0 && !any_sees_.contain(positions[end - 1])) --end;
    while (first < end && !any_sees_.contain(positions[first])) ++first;
    if (first == end) return;
    bool is_seen_by_all = true;
    for (int64_t i = first; i < end; ++i) is_seen_by_all &= all_see_.contain(positions[i]);
    const float *const from = keys + first * head_size_, *const to = values + first * head_size_;
    if (is_seen_by_all)
      score<false>(from, nullptr, end - first, Nothing{});
    else
      score<true>(from, positions + first, end - first, Nothing{});
    weigh(to, end - first, Nothing{});
  }

  // Writes the result [D] of the query in the given lane.
  void get_result(int64_t lane, float* out) const {
    float total[kQueries];
    for (int v = 0; v < kVectors; ++v) simd::store(total + v * kLanes, total_[v]);
    for (int64_t d = 0; d < head_size_; ++d) out[d] = sums_[d * kQueries + lane] / total[lane];
  }

 private:
  // The rows that are prefetched during a computation, because the denoiser's weights have
  // displaced them from the processor's caches. fetch() prefetches rows[number] of an array of
  // floats. `number` may be past the end of the array.
  struct Prefetched {
    const void* rows;
    [[gnu::always_inline]] void fetch(int64_t number) const {
      fetch_ahead(rows, static_cast<uintptr_t>(number) * sizeof(float));
    }
  };
  struct Nothing {
    [[gnu::always_inline]] void fetch(int64_t) const {}
  };

  // Computes the attention scores of `count` keys, and prefetches `next`. If kHides is true, each
  // lane ignores keys at positions that its query does not see.
  template <bool kHides, class Next>
  void score(const float* keys, const int64_t* positions, int64_t count, Next next) {
    F largest[kVectors];
    for (int v = 0; v < kVectors; ++v) largest[v] = largest_[v];
    for (int64_t from = 0; from < count; from += kBlock) {
      const int64_t there = least(kBlock, count - from);
      constexpr int kSums = kBlock * kVectors;
      F sums[kSums];
      const float* rows[kBlock];
      unroll<kBlock>([&](auto j) __attribute__((always_inline)) {
        // If the last block has fewer than kBlock keys, repeat the last key.
        rows[j] = keys + (from + least(j, there - 1)) * head_size_;
      });
      unroll<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = simd::zero(); });
      for (int64_t d = 0; d < head_size_; ++d) {
        next.fetch(from * head_size_ + d * kBlock);
        F queries[kVectors];
        unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          queries[v] = simd::load(queries_ + d * kQueries + v * kLanes);
        });
        unroll<kBlock>([&](auto j) __attribute__((always_inline)) {
          const F key = simd::set(rows[j][d]);
          unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
            sums[j * kVectors + v] = simd::fma(key, queries[v], sums[j * kVectors + v]);
          });
        });
      }
      float* const out = scores_ + from * kQueries;
      unroll<kSums>([&](auto i) __attribute__((always_inline)) {
        constexpr int v = i % kVectors;
        if constexpr (kHides) {
          const int64_t key = least(from + i / kVectors, count - 1);
          const I position = simd::iset(static_cast<int32_t>(positions[key]));
          const F behind = simd::to_float(simd::isub(position, last_seen_[v])),
                  before = simd::to_float(simd::isub(first_seen_[v], position));
          sums[i] = simd::select_greater(simd::max(behind, before), simd::zero(),
                                         simd::set(-__builtin_inff()), sums[i]);
        }
        // simd::max ignores NaN here. But if a score is NaN, the exponential below makes the result
        // NaN.
        largest[v] = simd::max(sums[i], largest[v]);
        simd::store(out + i * kLanes, sums[i]);
      });
    }
    for (int v = 0; v < kVectors; ++v) {
      shrink_[v] = exp2(largest_[v] - largest[v]);
      F total = total_[v] * shrink_[v];
      for (int64_t j = 0; j < count; ++j) {
        float* const at = scores_ + j * kQueries + v * kLanes;
        const F sum = simd::load(at);
        F weight = exp2(sum - largest[v]);
        if constexpr (kHides)
          weight = simd::select_greater(simd::set(kLowest), sum, simd::zero(), weight);
        simd::store(at, weight);
        total += weight;
      }
      total_[v] = total;
      largest_[v] = largest[v];
    }
  }

  // Multiplies `count` values by their softmax weights, and adds them to the result. Prefetches
  // `next`.
  template <class Next>
  void weigh(const float* values, int64_t count, Next next) {
    int64_t d = 0;
    for (; d + kBlock <= head_size_; d += kBlock) weigh<kBlock>(values, count, next, d);
    if (d == head_size_) return;
    with_constant<kBlock - 1>(head_size_ - d,
                              [&](auto rest) { weigh<rest>(values, count, next, d); });
  }

  template <int kTogether, class Next>
  void weigh(const float* values, int64_t count, Next next, int64_t d) {
    constexpr int kSums = kTogether * kVectors;
    F sums[kSums];
    float* const out = sums_ + d * kQueries;
    unroll<kSums>([&](auto i) __attribute__((always_inline)) {
      sums[i] = simd::load(out + i * kLanes) * shrink_[i % kVectors];
    });
    const float* value = values + d;
    const float* weight = scores_;
    for (int64_t j = 0; j < count; ++j, value += head_size_, weight += kQueries) {
      next.fetch(d * count + j * kTogether);
      F weights[kVectors];
      unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        weights[v] = simd::load(weight + v * kLanes);
      });
      unroll<kTogether>([&](auto i) __attribute__((always_inline)) {
        const F one = simd::set(value[i]);
        unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          sums[i * kVectors + v] = simd::fma(one, weights[v], sums[i * kVectors + v]);
        });
      });
    }
    unroll<kSums>([&](auto i)
                      __attribute__((always_inline)) { simd::store(out + i * kLanes, sums[i]); });
  }

  int64_t head_size_;
  F largest_[kVectors], total_[kVectors], shrink_[kVectors];
  struct Limits {
    int32_t first, last;
    bool contain(int64_t position) const { return position >= first && position <= last; }
  };
  I first_seen_[kVectors], last_seen_[kVectors];
  // The range of positions that all lanes see, and the range of positions that at least one lane
  // sees.
  Limits all_see_, any_sees_;
  float *scores_, *queries_, *sums_;
};

// Several tiles of queries that attend to the same keys. The keys are processed in groups of a few
// keys. Each group is read from memory and converted to floats once, and then added to all tiles.
//
// Each group is filled completely before the next group starts, and may contain both cached and new
// rows. So the groups do not depend on which rows are cached. With block-causal attention, a prompt
// therefore gives the same sums, to the last bit, in one pass and in several passes.
template <int kVectors>
class QueryTiles {
 public:
  static constexpr int64_t kQueries = Softmax<kVectors>::kQueries;

  // Returns the largest number of tiles whose queries and sums fit the second-level cache together.
  static int64_t most(int64_t head_size) {
    return kVectors == 1 ? 1 : least(kMostTiles, dlm::kLargestHeadSize / head_size);
  }

  QueryTiles(const dlm::CachedAttention& a, int64_t count)
      : head_size_(a.head_size),
        count_(count),
        group_(least(kKeys, kWidened / a.head_size)),
        hides_(a.is_limited()) {
    const int64_t size = head_size_ * kQueries;
    for (int64_t i = 0; i < count; ++i)
      tiles_[i].start(head_size_, scores_, queries_ + i * size, sums_ + i * size);
  }

  Softmax<kVectors>& operator[](int64_t tile) { return tiles_[tile]; }

  // Computes the attention to `rows` keys, and adds their values to the result. Both arrays are
  // [rows, D]. If `positions` [rows] is not NULL, each query ignores the keys at positions that it
  // does not see.
  void add(const float* keys, const float* values, const int64_t* positions, int64_t rows) {
    while (rows > 0) {
      const int64_t count = next(rows);
      if (is_held(count))
        hold(count, positions, [&](int64_t row, float* to_key, float* to_value) {
          __builtin_memcpy(to_key, keys + row * head_size_, head_size_ * sizeof(float));
          __builtin_memcpy(to_value, values + row * head_size_, head_size_ * sizeof(float));
        });
      else
        add_group(keys, values, positions, count);
      keys += count * head_size_, values += count * head_size_, rows -= count;
      if (positions != nullptr) positions += count;
    }
  }

  // Like add(), but for keys and values in the cache's format. Every query sees these keys.
  template <class Rows>
  void add_stored(const uint8_t* keys, const uint8_t* values, int64_t rows) {
    const int64_t size = head_size_, bytes = Rows::bytes(size);
    alignas(64) float wide_keys[kWidened], more[kVectors == 1 ? 1 : kWidened];
    // If there is only one tile, the keys are no longer needed when the values are added. So the
    // values may overwrite the keys.
    float* const wide_values = kVectors == 1 ? wide_keys : more;
    const auto widen = [size, bytes](const uint8_t* stored, int64_t count, float* wide)
                           __attribute__((always_inline)) {
                             for (int64_t j = 0; j < count; ++j)
                               Rows::widen(stored + j * bytes, size, wide + j * size);
                           };
    for (int64_t count; rows > 0; keys += count * bytes, values += count * bytes, rows -= count) {
      count = next(rows);
      if (is_held(count)) {
        hold(count, nullptr, [&](int64_t row, float* to_key, float* to_value) {
          widen(keys + row * bytes, 1, to_key);
          widen(values + row * bytes, 1, to_value);
        });
        continue;
      }
      widen(keys, count, wide_keys);
      tiles_[0].add(wide_keys, wide_values, count, values, keys + count * bytes,
                    [&]() __attribute__((always_inline)) { widen(values, count, wide_values); });
      if constexpr (kVectors > 1)
        for (int64_t i = 1; i < count_; ++i) tiles_[i].add_recent(wide_keys, wide_values, count);
    }
  }

  // Adds the rows of the last group, which may be incomplete. Call this function before get_result.
  void finish() {
    if (held_ == 0) return;
    add_group(held_keys_, held_values_, hides_ ? held_positions_ : nullptr, held_);
    held_ = 0;
  }

 private:
  static constexpr int64_t kKeys = Softmax<kVectors>::kKeys, kMostTiles = kVectors == 1 ? 1 : 8;
  // If true, the rows of a group are copied to a buffer until the group is complete. With few
  // queries, memory bandwidth limits the speed, so rows are not copied.
  static constexpr bool kHolds = kVectors > 1;

  // The largest number of floats in the keys of a group. With one vector of queries, the floats fit
  // the first-level cache. Otherwise they fit the second-level cache.
  static constexpr int64_t kWidened = kVectors == 1 ? 4096 : 8192;

  // If `rows` more rows follow, returns how many of them belong to the current group.
  int64_t next(int64_t rows) const { return least(rows, group_ - held_); }
  // Returns true if the next `count` rows must be copied, because they do not fill a group.
  bool is_held(int64_t count) const { return kHolds && count < group_; }

  // Copies rows of a group that is not complete yet.
  template <class Copy>
  void hold(int64_t count, const int64_t* positions, Copy copy) {
    for (int64_t row = 0; row < count; ++row, ++held_) {
      copy(row, held_keys_ + held_ * head_size_, held_values_ + held_ * head_size_);
      // Without positions, every query sees all cached rows: they get position 0, which every query
      // sees.
      held_positions_[held_] = positions == nullptr ? 0 : positions[row];
    }
    if (held_ == group_) finish();
  }

  void add_group(const float* keys, const float* values, const int64_t* positions, int64_t count) {
    if (positions != nullptr) {
      for (int64_t i = 0; i < count_; ++i) tiles_[i].add_seen(keys, values, positions, count);
      return;
    }
    tiles_[0].add(keys, values, count, values, keys + count * head_size_, [] {});
    for (int64_t i = 1; i < count_; ++i) tiles_[i].add_recent(keys, values, count);
  }

  const int64_t head_size_, count_, group_;
  const bool hides_;
  Softmax<kVectors> tiles_[kMostTiles];
  alignas(64) float scores_[kKeys * kQueries];
  alignas(64) float queries_[dlm::kLargestHeadSize * kQueries];
  alignas(64) float sums_[dlm::kLargestHeadSize * kQueries];
  // rows that were copied for an incomplete group
  int64_t held_ = 0, held_positions_[kHolds ? kKeys : 1];
  alignas(64) float held_keys_[kHolds ? kWidened : 1];
  alignas(64) float held_values_[kHolds ? kWidened : 1];
};

// Stores `count` new keys or values [count, D] in the cache's format. If `is_rounded` is true, also
// replaces `rows` by the numbers that later passes will read from the cache.
template <class Rows>
void store_rows(float* rows, int64_t count, int64_t D, bool is_rounded, uint8_t* stored) {
  for (int64_t t = 0; t < count; ++t) {
    uint8_t* const row = stored + t * Rows::bytes(D);
    Rows::store(rows + t * D, D, row);
    if (is_rounded) Rows::widen(row, D, rows + t * D);
  }
}

// The tokens of one request, and the request's rows for one key/value head.
struct Part {
  dlm::Segment segment;  // the request's first segment
  int64_t number, batch, kv_head;

  Part(const dlm::CachedAttention& a, int64_t number, int64_t head)
      : segment(a.part(number)), number(number), batch(a.batch_of(number)), kv_head(head) {}

  int64_t token(const dlm::CachedAttention& a, int64_t t) const {
    return batch * a.tokens + segment.first + t;
  }
  // first_new returns the index of the request's first new row in an array [B, Hkv, T]. first_past
  // returns the index of a segment's first cached row. Hkv is the number of key/value heads.
  int64_t first_new(const dlm::CachedAttention& a) const {
    return (batch * a.kv_heads + kv_head) * a.tokens + segment.first;
  }
  int64_t first_past(const dlm::CachedAttention& a, const dlm::Segment& of) const {
    return (batch * a.kv_heads + kv_head) * a.cached + of.start;
  }
};

// Writes the new keys and values of one request and one head twice: as the floats that this pass
// reads, and in the format of the cache.
inline void keep_new_rows(const dlm::CachedAttention& a, const Part& part) {
  const int64_t D = a.head_size, T = part.segment.tokens, row = part.first_new(a);
  float *const keys = a.new_keys + row * D, *const values = a.new_values + row * D;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t token = part.token(a, t), from = (token * a.kv_heads + part.kv_head) * D;
    norm_and_turn(a, a.k + from, a.k_norm, a.positions[token], keys + t * D);
    __builtin_memcpy(values + t * D, a.v + from, D * sizeof(float));
  }
  if (a.cache == dlm::CacheType::fp32) return;
  const int64_t offset = row * a.row_bytes();
  auto* const stored_keys = static_cast<uint8_t*>(a.present_keys) + offset;
  auto* const stored_values = static_cast<uint8_t*>(a.present_values) + offset;
  const auto store = a.cache == dlm::CacheType::fp16 ? store_rows<Fp16Rows> : store_rows<Int8Rows>;
  store(keys, T, D, a.reads_rounded(), stored_keys);
  store(values, T, D, a.reads_rounded(), stored_values);
}

inline void widen_row(dlm::CacheType cache, const uint8_t* row, int64_t D, float* out) {
  switch (cache) {
    case dlm::CacheType::fp32:
      __builtin_memcpy(out, row, D * sizeof(float));
      return;
    case dlm::CacheType::fp16:
      return Fp16Rows::widen(row, D, out);
    case dlm::CacheType::int8:
      return Int8Rows::widen(row, D, out);
  }
}

// Computes the attention of the queries to the cached rows of one segment and one head.
template <class Attending>
void add_past(const dlm::CachedAttention& a, const Part& part, const dlm::Segment& of,
              Attending& softmax) {
  const int64_t S = of.cached, offset = part.first_past(a, of) * a.row_bytes();
  const uint8_t* const keys = static_cast<const uint8_t*>(a.past_keys) + offset;
  const uint8_t* const values = static_cast<const uint8_t*>(a.past_values) + offset;
  switch (a.cache) {
    case dlm::CacheType::fp32:
      return softmax.add(reinterpret_cast<const float*>(keys),
                         reinterpret_cast<const float*>(values), nullptr, S);
    case dlm::CacheType::fp16:
      return softmax.template add_stored<Fp16Rows>(keys, values, S);
    case dlm::CacheType::int8:
      return softmax.template add_stored<Int8Rows>(keys, values, S);
  }
}

// Computes the attention of the queries to the cached rows of a request, if the queries see only
// the rows in a window. The rows belong to the last positions before the request's first token, in
// order. `least_token` is the token of the first query.
template <class Attending>
void add_window(const dlm::CachedAttention& a, const Part& part, int64_t least_token,
                Attending& softmax) {
  constexpr int64_t kRows = 8;
  const int64_t D = a.head_size, position = a.positions[part.token(a, 0)],
                total = a.cached_of(part.number), first = a.table_row(position) - total;
  const bool is_draft = position >= a.table_rows;
  // The first rows are outside of the windows of all queries.
  int64_t skipped = most(0, total - a.window + (is_draft ? 0 : least_token)), place = first;
  alignas(64) float keys[kRows * dlm::kLargestHeadSize], values[kRows * dlm::kLargestHeadSize];
  int64_t positions[kRows];
  for (int64_t number = 0; number < a.segments_of(part.number); ++number) {
    const dlm::Segment of = a.segment(part.number, number);
    const int64_t start = least(skipped, of.cached);
    skipped -= start, place += start;
    const int64_t offset = (part.first_past(a, of) + start) * a.row_bytes();
    const uint8_t* key = static_cast<const uint8_t*>(a.past_keys) + offset;
    const uint8_t* value = static_cast<const uint8_t*>(a.past_values) + offset;
    for (int64_t row = start, count; row < of.cached; row += count) {
      count = least(kRows, of.cached - row);
      for (int64_t i = 0; i < count; ++i, key += a.row_bytes(), value += a.row_bytes()) {
        widen_row(a.cache, key, D, keys + i * D);
        widen_row(a.cache, value, D, values + i * D);
        positions[i] = place++;
      }
      softmax.add(keys, values, positions, count);
    }
  }
}

// Computes the attention of the requests that a.computes() selects. All query heads that share a
// key/value head are processed together. Their queries are sorted by token, then by head.
template <int kVectors>
void attend(const dlm::CachedAttention& a, dlm::Parallel& parallel) {
  constexpr int64_t kQueries = QueryTiles<kVectors>::kQueries;
  const int64_t D = a.head_size, group = a.heads / a.kv_heads, parts = a.parts();
  // Give a task several tiles only if this leaves enough tasks for all threads.
  const int64_t all = a.batch * a.tokens * a.heads / kQueries,
                most_tiles = most(1, least(QueryTiles<kVectors>::most(D), all / kEnoughTasks)),
                most_queries = most_tiles * kQueries;
  const auto tasks_of = [&](int64_t number) -> int64_t {
    return a.computes(number) ? (a.queries(number) + most_queries - 1) / most_queries : 0;
  };
  int64_t tasks = 0, most_tasks = 0;
  for (int64_t number = 0; number < parts; ++number) {
    tasks += tasks_of(number);
    most_tasks = most(most_tasks, tasks_of(number));
  }
  // If several tasks work on one head of a request, all of them read the new rows. So the new rows
  // must be written before these tasks start.
  if (most_tasks > 1) {
    parallel.each(parts * a.kv_heads, [&](int64_t i) {
      const int64_t number = i / a.kv_heads;
      if (tasks_of(number) > 1) keep_new_rows(a, Part(a, number, i % a.kv_heads));
    });
  }
  // The softmax uses powers of 2 instead of powers of e. So queries are also multiplied by log2(e).
  const float scale = kLog2e * a.scale;
  parallel.each(tasks * a.kv_heads, [&](int64_t i) {
    // The tasks of one request and one key/value head have consecutive indices.
    int64_t number = 0, at = i;
    for (; at >= tasks_of(number) * a.kv_heads; ++number) at -= tasks_of(number) * a.kv_heads;
    const int64_t own = tasks_of(number);
    const Part part(a, number, at / own);
    const int64_t queries = a.queries(number);
    const int64_t first = at % own * most_queries, last = least(first + most_queries, queries);
    if (own == 1) keep_new_rows(a, part);
    const auto offset = [&](int64_t query) {  // returns the offset of a query's row in q and in y
      return (part.token(a, query / group) * a.heads + part.kv_head * group + query % group) * D;
    };
    const int64_t tiles = (last - first + kQueries - 1) / kQueries;
    QueryTiles<kVectors> softmax(a, tiles);
    alignas(64) float row[dlm::kLargestHeadSize];
    int32_t first_seen[kQueries], last_seen[kQueries];
    for (int64_t tile = 0; tile < tiles; ++tile) {
      for (int64_t lane = 0; lane < kQueries; ++lane) {
        // If there are fewer queries than lanes, the remaining lanes repeat the last query.
        const int64_t query = least(first + tile * kQueries + lane, last - 1);
        const int64_t position = a.positions[part.token(a, query / group)];
        norm_and_turn(a, a.q + offset(query), a.q_norm, position, row);
        softmax[tile].set_query(lane, row, scale);
        if (!a.is_limited()) continue;
        first_seen[lane] = a.first_seen(position), last_seen[lane] = a.last_seen(position);
      }
      if (a.is_limited()) softmax[tile].set_seen(first_seen, last_seen);
    }
    if (a.window != 0)
      add_window(a, part, first / group, softmax);
    else
      for (int64_t each = 0; each < a.segments_of(number); ++each)
        add_past(a, part, a.segment(number, each), softmax);
    const int64_t T = part.segment.tokens, new_row = part.first_new(a) * D;
    const float *const keys = a.new_keys + new_row, *const values = a.new_values + new_row;
    softmax.add(keys, values, a.is_limited() ? a.positions + part.token(a, 0) : nullptr, T);
    softmax.finish();
    for (int64_t query = first; query < last; ++query)
      softmax[(query - first) / kQueries].get_result((query - first) % kQueries,
                                                     a.y + offset(query));
  });
}

// Requests whose queries fit in one vector use a faster version. The choice between the versions
// depends only on the request, so the result of a request does not depend on the other requests in
// the pass.
void attention(const dlm::CachedAttention& a, dlm::Parallel& parallel) {
  a.split(
      kLanes, [&](const dlm::CachedAttention& few) { attend<1>(few, parallel); },
      [&](const dlm::CachedAttention& many) { attend<simd::kQueryVectors>(many, parallel); });
}

}  // namespace
