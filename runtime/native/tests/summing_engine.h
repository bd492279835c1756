// An engine with a fake denoiser. Its predictions depend on every row that a pass sees, and on
// nothing else. So the canvas changes if a token is in a wrong position, or if a pass sees a row of
// another request.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "decode/cost.h"
#include "engines/engine.h"

namespace {

constexpr int32_t kVocabulary = 13, kMask = 0, kEnd = 1, kLongest = 96;
// The conditioning_size of the denoiser that starts from random tokens.
constexpr int32_t kConditioning = 3;

uint64_t mix(uint64_t x) {  // the SplitMix64 generator
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// In every head and layer, a row contains a token and its position. A prediction depends on the sum
// of all rows that the pass sees. If `window` is above 0, layer 1 sees only the rows that are at
// most `window` positions before a row, or before the first row of a draft pass. The cache of this
// layer may then contain all rows, or only those that the pass sees.
class Summing final : public dlm::HostEngine {
 public:
  Summing(dlm::CacheShape cache, int64_t visible_block, bool takes_segments,
          bool has_conditioning = false, int64_t window = 0, bool has_causal_drafts = false)
      : HostEngine(std::move(cache)),
        visible_block_(visible_block),
        takes_segments_(takes_segments),
        mask_(has_conditioning || has_causal_drafts ? kVocabulary : kMask),
        window_(window),
        has_causal_drafts_(has_causal_drafts) {}

  bool takes_segments() const override { return takes_segments_; }
  std::string description() const override { return "made up"; }
  void fail_after(int passes) { fails_after_ = passes; }
  int64_t most_requests() const { return most_requests_; }
  // After this call, the engine adds up the predicted times of its passes, and records the most
  // expensive shared pass.
  void count_by(const dlm::PassCost& cost) { cost_ = cost; }
  double cost() const { return spent_; }
  // Sets the smallest time that each pass takes.
  void take(std::chrono::microseconds time) { time_ = time; }
  double costliest_shared() const { return costliest_shared_; }

  void run(const dlm::Pass& pass, const std::vector<dlm::Segment>& segments,
           const dlm::WindowRows& window) override {
    if (fails_after_ >= 0 && fails_after_-- == 0) dlm::fail(DLM_ENGINE_FAILED, "made to fail");
    if (mask_ == kVocabulary) check_tokens(pass);
    std::vector<Part> parts;
    if (segments.empty())
      for (int64_t b = 0; b < pass.batch; ++b)
        parts.push_back({0, pass.tokens, pass.cached, {{0, pass.cached}}, {{0, window.cached}}});
    for (const dlm::Segment& segment : segments) {
      if (parts.empty() || parts.back().first != segment.first)
        parts.push_back({segment.first, segment.tokens, 0, {}, {}});
      parts.back().cached += segment.cached;
      parts.back().rows.push_back({segment.start, segment.cached});
    }
    size_t owner = 0;
    for (const dlm::Segment& segment : segments.empty() ? segments : window.segments) {
      while (owner < parts.size() && parts[owner].first != segment.first) ++owner;
      if (owner == parts.size() || parts[owner].tokens != segment.tokens)
        dlm::fail(DLM_INTERNAL, "segments of layers with a window in another order");
      parts[owner].window_rows.push_back({segment.start, segment.cached});
    }
    most_requests_ = std::max<int64_t>(most_requests_, static_cast<int64_t>(parts.size()));
    count(pass, parts);
    std::this_thread::sleep_for(time_);
    for (size_t number = 0; number < parts.size(); ++number) {
      const int64_t b = segments.empty() ? static_cast<int64_t>(number) : 0;
      keep(pass, b, parts[number]);
      score(pass, b, parts[number], window.cached);
    }
  }

 private:
  // The tokens of one request, and the ranges of its cached rows. A range is a pair of a first row
  // and a number of rows. window_rows: the ranges of the layers with a window.
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  struct Part {
    int64_t first, tokens, cached;
    Ranges rows, window_rows;
  };

  void count(const dlm_pass& pass, const std::vector<Part>& parts) {
    dlm::PassLoad load{0, static_cast<double>(pass.rows), 0};
    for (const Part& part : parts) {
      load.tokens += static_cast<double>(part.tokens);
      load.pairs += static_cast<double>(part.tokens * (part.tokens + part.cached));
    }
    const double cost = cost_.of(load);
    spent_ += cost;
    if (parts.size() > 1) costliest_shared_ = std::max(costliest_shared_, cost);
  }

  // Checks a pass of the denoiser that starts from random tokens. Its mask_token_id must not be an
  // input, and rows of causal passes must not have self-conditioning.
  void check_tokens(const dlm_pass& pass) const {
    for (int64_t at = 0; at < int64_t{pass.batch} * pass.tokens; ++at) {
      if (pass.input_ids[at] >= kVocabulary) dlm::fail(DLM_INTERNAL, "a pass over no token");
      if (pass.position_ids[at] < kLongest && conditioning_sum(pass, at) != 0)
        dlm::fail(DLM_INTERNAL, "self-conditioning of a causal row");
    }
  }

  // Returns a number that depends on the self-conditioning of a row. If all its numbers are 0,
  // returns 0.
  static uint64_t conditioning_sum(const dlm_pass& pass, int64_t at) {
    uint64_t sum = 0;
    if (pass.conditioning == nullptr) return sum;
    for (int64_t c = 0; c < kConditioning; ++c)
      if (const float number = pass.conditioning[at * kConditioning + c]; number != 0)
        sum += mix(static_cast<uint64_t>(number) * kConditioning + static_cast<uint64_t>(c));
    return sum;
  }

  static uint64_t value_of(int64_t token, int64_t position) {
    return mix(static_cast<uint64_t>(token) * 100003 + static_cast<uint64_t>(position));
  }

  void keep(const dlm_pass& pass, int64_t b, const Part& part) const {
    if (pass.present_keys == nullptr) return;
    for (size_t layer = 0; layer < cache_.size(); ++layer)
      for (int32_t head = 0; head < cache_[layer].kv_heads; ++head)
        for (int64_t t = part.first; t < part.first + part.tokens; ++t) {
          const float row[2] = {static_cast<float>(pass.input_ids[b * pass.tokens + t]),
                                static_cast<float>(pass.position_ids[b * pass.tokens + t])};
          const int64_t at = ((b * cache_[layer].kv_heads + head) * pass.tokens + t) * 2;
          std::memcpy(static_cast<float*>(pass.present_keys[layer]) + at, row, sizeof row);
          std::memcpy(static_cast<float*>(pass.present_values[layer]) + at, row, sizeof row);
        }
  }

  bool is_near(size_t layer) const { return window_ > 0 && layer == 1; }

  // Returns the sum of the cached rows of one head of one layer that the query sees. The sums of
  // all heads and layers must be equal. If of_near is true, returns the sum for layer 1. Otherwise,
  // returns the sum for the layers without a window.
  uint64_t cached_sum(const dlm_pass& pass, int64_t b, const Part& part, int32_t window_cached,
                      int64_t first_seen, bool of_near) const {
    uint64_t found = 0;
    if (part.cached == 0) return found;
    const int64_t begin = pass.position_ids[b * pass.tokens + part.first] % kLongest;
    for (size_t layer = 0; layer < cache_.size(); ++layer)
      for (const void* const* const tensors : {pass.past_keys, pass.past_values})
        for (int32_t head = 0; is_near(layer) == of_near && head < cache_[layer].kv_heads; ++head) {
          uint64_t sum = 0;
          const bool is_kept = cache_[layer].window > 0;
          const int64_t cached = is_kept ? window_cached : pass.cached;
          const Ranges& ranges = is_kept ? part.window_rows : part.rows;
          const auto* const rows = static_cast<const float*>(tensors[layer]) +
                                   (b * cache_[layer].kv_heads + head) * cached * 2;
          int64_t position = begin;
          for (const auto& [start, count] : ranges) position -= is_kept ? count : 0;
          if (is_kept && position != std::max<int64_t>(0, begin - window_))
            dlm::fail(DLM_INTERNAL, "a layer with a window reads other rows than its window");
          for (const auto& [start, count] : ranges)
            for (int64_t i = start; i < start + count; ++i) {
              const auto at = static_cast<int64_t>(rows[2 * i + 1]);
              if (is_kept && at != position++)
                dlm::fail(DLM_INTERNAL, "cached rows that are not in order");
              if (at >= first_seen) sum += value_of(static_cast<int64_t>(rows[2 * i]), at);
            }
          if (found != 0 && found != sum) dlm::fail(DLM_INTERNAL, "heads that see other rows");
          found = sum;
        }
    return found;
  }

  void score(const dlm_pass& pass, int64_t b, const Part& part, int32_t window_cached) const {
    const int64_t* const ids = pass.input_ids + b * pass.tokens;
    const int64_t* const positions = pass.position_ids + b * pass.tokens;
    const uint64_t cached = cached_sum(pass, b, part, window_cached, 0, false);
    for (int64_t r = 0; r < pass.rows; ++r) {
      const int64_t row = b * pass.rows + r, query = pass.score_rows[row];
      if (query < part.first || query >= part.first + part.tokens) continue;
      uint64_t sum = cached;
      for (int64_t t = part.first; t < part.first + part.tokens; ++t)
        if (visible_block_ == 0 || block_of(positions[t]) <= block_of(positions[query]))
          sum += value_of(ids[t], positions[t]) + conditioning_sum(pass, b * pass.tokens + t);
      if (window_ > 0) {
        const bool is_draft = positions[query] >= kLongest;
        const int64_t first_seen = positions[is_draft ? part.first : query] % kLongest - window_;
        sum = mix(sum) + cached_sum(pass, b, part, window_cached, first_seen, true);
        for (int64_t t = part.first; t < part.first + part.tokens; ++t)
          if (positions[t] % kLongest >= first_seen && (is_draft || t <= query))
            sum += value_of(ids[t], positions[t]);
      }
      predict(pass, row, mix(sum ^ static_cast<uint64_t>(positions[query])));
    }
  }

  // With visible_block 1, the denoiser has draft passes. All rows of a draft pass form one block,
  // unless draft passes are causal.
  int64_t block_of(int64_t position) const {
    if (has_causal_drafts_) return position % kLongest;
    return visible_block_ == 1 ? std::min<int64_t>(position, kLongest) : position / visible_block_;
  }

  void predict(const dlm_pass& pass, int64_t row, uint64_t seed) const {
    double logits[kVocabulary], total = 0;
    int32_t order[kVocabulary];
    for (int32_t v = 0; v < kVocabulary; ++v) {
      // The logits make end tokens rare, so that requests run for a while.
      logits[v] = static_cast<double>(mix(seed + static_cast<uint64_t>(v)) % 9000) / 1000 -
                  (v == kEnd ? 4 : 0);
      order[v] = v;
      if (pass.logits != nullptr)
        pass.logits[row * kVocabulary + v] = static_cast<float>(logits[v]);
    }
    for (int32_t v = 0; v < kVocabulary; ++v) total += v == mask_ ? 0 : std::exp(logits[v]);
    std::stable_sort(order, order + kVocabulary, [&](int32_t one, int32_t other) {
      return (one == mask_ ? -1e9 : logits[one]) > (other == mask_ ? -1e9 : logits[other]);
    });
    double entropy = 0;
    for (int32_t v = 0; v < kVocabulary; ++v)
      if (v != mask_ && std::isfinite(logits[v]))
        entropy += std::exp(logits[v]) / total * (logits[v] - std::log(total));
    for (int k = 0; k < 2; ++k) {
      pass.top_tokens[2 * row + k] = order[k];
      const double weight = std::exp(logits[order[k]]);
      pass.top_probs[2 * row + k] = static_cast<float>(weight / total);
      pass.top_log_odds[2 * row + k] = static_cast<float>(std::log(weight / (total - weight)));
    }
    if (pass.entropy != nullptr) pass.entropy[row] = static_cast<float>(entropy);
    // The numbers are integers below 2^16, which a float represents exactly.
    for (int32_t c = 0; pass.next_conditioning != nullptr && c < kConditioning; ++c)
      pass.next_conditioning[row * kConditioning + c] = static_cast<float>(
          mix(seed + static_cast<uint64_t>(pass.temperature[row] * 1000) + c) % 65535 + 1);
  }

  const int64_t visible_block_;
  const bool takes_segments_;
  const int32_t mask_;  // kVocabulary if the denoiser has no mask token
  const int64_t window_;
  const bool has_causal_drafts_;
  int fails_after_ = -1;
  int64_t most_requests_ = 0;
  dlm::PassCost cost_{};
  double spent_ = 0, costliest_shared_ = 0;
  std::chrono::microseconds time_{0};
};

// If `window` is above 0, layer 1 keeps only the rows in its window.
dlm::CacheShape shape(int32_t window = 0) { return {{2, 2, 4}, {1, 2, 4, 0, window}}; }

dlm::Denoiser denoiser(int32_t visible_block, int32_t shift) {
  return {kVocabulary,
          kMask,
          kLongest,
          2,
          shift,
          true,
          shape(),
          {kEnd},
          visible_block,
          128,
          visible_block == 1 ? 8 : 0,
          visible_block == 1};
}

// Returns an autoregressive denoiser with draft passes.
dlm::Denoiser autoregressive_denoiser() {
  dlm::Denoiser of = denoiser(1, 1);
  of.mask_token_id = kVocabulary;
  return of;
}

// Returns a denoiser that has self-conditioning, and starts from random tokens.
dlm::Denoiser noised_denoiser() {
  dlm::Denoiser of = denoiser(1, 0);
  of.mask_token_id = kVocabulary;
  of.conditioning_size = kConditioning;
  return of;
}

}  // namespace
