#include "decode/sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "base/gumbel.h"

namespace dlm {
namespace {

// Compares two tokens, so that sorting gives descending logits. Tokens with equal logits are in
// ascending order of their ids.
struct IsBefore {
  const float* logits;
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

struct Best {
  int32_t token;
  bool is_finite;  // true if no logit is NaN or +inf, and at least one logit is above -inf
};

Best find_best(const float* logits, int32_t vocab_size, int32_t left_out) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  // Computes eight maxima independently, so that the processor can update them in parallel.
  std::array<float, 8> largest;
  largest.fill(-kInfinite);
  std::array<int32_t, 8> bad{};
  const auto see = [&](int32_t token, size_t lane) {
    const float logit = logits[token];
    bad[lane] |= static_cast<int32_t>(!(logit < kInfinite));
    largest[lane] = logit > largest[lane] ? logit : largest[lane];
  };
  for (const auto& [first, last] : {std::pair{0, left_out}, std::pair{left_out + 1, vocab_size}}) {
    int32_t token = first;
    for (; token + 8 <= last; token += 8)
      for (size_t lane = 0; lane < 8; ++lane) see(token + static_cast<int32_t>(lane), lane);
    for (; token < last; ++token) see(token, 0);
  }
  const float most = *std::max_element(largest.begin(), largest.end());
  const bool is_bad = std::any_of(bad.begin(), bad.end(), [](int32_t each) { return each != 0; });
  int32_t best = left_out == 0 ? 1 : 0;
  if (is_bad || most == -kInfinite) return {best, false};
  while (logits[best] != most || best == left_out) ++best;
  return {best, true};
}

}  // namespace

void Winner::see(int32_t token, double log_weight) {
  const float bound = exp_bound(static_cast<float>(log_weight * kLog2E));
  if (spare_ != nullptr && spare_[token] > bound * scale_) return;
  const double u = uniform(token);
  // The winner is the token that the draw chooses. This test rejects almost all other tokens
  // without computing a logarithm. It never rejects the winner, because -ln(-ln u) <= -ln(1 - u).
  if (1 - u > bound * scale_) return;
  const double value = log_weight - std::log(-std::log(u));
  if (value < best_ || (value == best_ && token > token_)) return;
  best_ = value;
  token_ = token;
  scale_ = std::exp(-best_) * (1 + 1e-9);
}

// Each token has a random number u. For `count` tokens, computes the first 24 bits of 1 - u.
// `first` must be even. If `count` is odd, the function also computes these bits for one more
// token.
void Winner::find_spare(int32_t first, int32_t count, float* spare) const {
  for (int32_t i = 0; i < count; i += 2) {
    const auto words = words_of((first + i) / 2);
    spare[i] = spare_of(words[0]), spare[i + 1] = spare_of(words[2]);
  }
}

void Winner::prepare(int32_t vocab_size, std::vector<float>& spare) {
  spare.resize(static_cast<size_t>(vocab_size) + 1);
  find_spare(0, vocab_size, spare.data());
  spare_ = spare.data();
}

// Like see(), but for a range of tokens.
void Winner::see_row(const float* logits, int32_t first, int32_t last, float best,
                     double temperature) {
  constexpr int32_t kSome = 128;
  // The difference of two logits can overflow, so the code multiplies half of the difference by
  // `slope`. If the difference is -inf and `slope` is 0, the product is NaN. In this case, the
  // bound is 0.
  const auto slope = static_cast<float>(std::min(2 * kLog2E / temperature, 1e30));
  const float half_best = 0.5f * best;
  std::array<float, kSome> weights, spare;
  for (int32_t from = first / 2 * 2; from < last; from += kSome) {
    const int32_t count = std::min(kSome, last - from), skipped = std::max(0, first - from);
    for (int32_t i = skipped; i < count; ++i)
      weights[i] = exp_bound((0.5f * logits[from + i] - half_best) * slope);
    find_spare(from, count, spare.data());
    const auto scale = static_cast<float>(std::min(scale_ * 1.0001, 1e30));
    for (int32_t i = skipped; i < count; ++i) {
      if (spare[i] > weights[i] * scale) continue;
      const double behind =
          (static_cast<double>(logits[from + i]) - static_cast<double>(best)) / temperature;
      if (behind >= -kFarthest) see(from + i, behind);
    }
  }
}

Words Winner::words_of(int32_t pair) const {
  return philox(key_.seed, {{key_.step, key_.position, static_cast<uint32_t>(pair), kDraws}});
}

// Returns the uniform random number of a token. Two tokens share one block of random 32-bit words.
double Winner::uniform(int32_t token) {
  if (token / 2 != pair_) {
    pair_ = token / 2;
    words_ = words_of(pair_);
  }
  return token % 2 == 0 ? unit(words_[0], words_[1]) : unit(words_[2], words_[3]);
}

// Computes the weight of each token at the temperature (weights_), and the sum of these weights
// (total_).
void Sampler::temper(const Tempered& tempered, int32_t vocab_size, int32_t left_out) {
  weights_.resize(static_cast<size_t>(vocab_size));
  double total = 0;
  for (int32_t token = 0; token < vocab_size; ++token) {
    const double behind = tempered(token);
    const double weight = behind < -kFarthest || token == left_out ? 0 : std::exp(behind);
    weights_[token] = weight;
    total += weight;
  }
  total_ = total;
}

Cut Sampler::find_cut(const float* logits, int32_t vocab_size, int32_t left_out,
                      const Sampling& sampling) {
  const auto [best, is_finite] = find_best(logits, vocab_size, left_out);
  if (!is_finite) return {};
  temper({logits, best, sampling.temperature}, vocab_size, left_out);
  cut(logits, sampling);
  if (sampling.top_p >= 1 && kept_.size() < static_cast<size_t>(sampling.top_k)) {
    // Some of the top_k best tokens are so unlikely that their weight is 0. The draw cannot choose
    // them, but this function must not cut them, because a constraint may need them.
    kept_.clear();
    for (int32_t token = 0; token < vocab_size; ++token)
      if (token != left_out && logits[token] > -std::numeric_limits<float>::infinity())
        kept_.push_back(token);
    keep_best(logits, sampling.top_k);
  }
  Cut last{logits[best], best};
  for (const int32_t token : kept_)
    if (!last.keeps(logits[token], token)) last = {logits[token], token};
  return last;
}

Draw Sampler::draw(const float* logits, int32_t vocab_size, int32_t left_out,
                   const Sampling& sampling, const DrawKey& key, Told told) {
  const auto [best, is_finite] = find_best(logits, vocab_size, left_out);
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (!is_finite) return {best, kNone, kNone, kNone};
  const Tempered tempered{logits, best, sampling.temperature};
  const bool is_cut = sampling.top_k > 0 || sampling.top_p < 1;
  Winner winner(key);
  winner.see(best, 0);
  if (!is_cut) {
    winner.see_row(logits, 0, left_out, logits[best], sampling.temperature);
    winner.see_row(logits, left_out + 1, vocab_size, logits[best], sampling.temperature);
    if (told == Told::token) return {winner.token(), 0, 0, 0};
  }
  temper(tempered, vocab_size, left_out);
  double sum = 1, second = 0, product = 0;
  // `best` is copied, because a lambda in C++17 cannot capture a structured binding.
  const auto count = [&, best = best](int32_t token) {
    const double weight = weights_[token];
    if (weight == 0 || token == best) return;
    sum += weight;
    second = std::max(second, weight);
    if (told == Told::entropy) product += weight * tempered(token);
    if (is_cut) winner.see(token, tempered(token));
  };
  if (is_cut) {
    cut(logits, sampling);
    std::for_each(kept_.begin(), kept_.end(), count);
  } else {
    for (int32_t token = 0; token < vocab_size; ++token) count(token);
  }
  // ln p is (logit - best logit) / temperature, minus the logarithm of the sum of weights.
  return {winner.token(), weights_[winner.token()] / sum, (1 - second) / sum,
          product / sum - std::log(sum)};
}

// Reduces kept_ to its top_k best tokens. If top_k is 0, does nothing.
void Sampler::keep_best(const float* logits, int32_t top_k) {
  const auto count = static_cast<size_t>(top_k);
  if (count == 0 || count >= kept_.size()) return;
  std::nth_element(kept_.begin(), kept_.begin() + top_k, kept_.end(), IsBefore{logits});
  kept_.resize(count);
}

// Applies top_k and top_p, and stores the remaining tokens in kept_. Uses bisection to find these
// tokens in linear time.
void Sampler::cut(const float* logits, const Sampling& sampling) {
  kept_.clear();
  // The function first cuts all tokens with a weight below `least`. The sum of their weights is
  // less than the total weight that top_p may cut.
  const double least = 0.5 * (1 - sampling.top_p) * total_ / static_cast<double>(weights_.size());
  for (size_t token = 0; token < weights_.size(); ++token)
    if (weights_[token] > 0 && weights_[token] >= least)
      kept_.push_back(static_cast<int32_t>(token));
  const IsBefore is_before{logits};
  const auto at = [&](size_t rank) { return kept_.begin() + static_cast<std::ptrdiff_t>(rank); };
  keep_best(logits, sampling.top_k);
  if (sampling.top_p >= 1) return;
  // Tokens are ranked by descending logit. In each round of the bisection, the code already knows
  // that the token of rank `first` stays, and that the token of rank `last` is cut. `before` is the
  // total weight of all tokens ranked before `first`.
  size_t first = 0, last = kept_.size();
  for (double before = 0; last - first > 1;) {
    const size_t middle = first + (last - first) / 2;
    std::nth_element(at(first), at(middle), at(last), is_before);
    double sum = before;
    for (size_t rank = first; rank < middle; ++rank) sum += weights_[kept_[rank]];
    if (sum > sampling.top_p * total_)
      last = middle;
    else
      first = middle, before = sum;
  }
  kept_.resize(last);
}

}  // namespace dlm
