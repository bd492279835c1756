#include "sampling.h"

#include <algorithm>
#include <cmath>

#include "random.h"

namespace dlm {
namespace {

// A row's logits, tempered and counted from the best one's.
struct Tempered {
  const float* logits;
  int32_t best;
  double temperature;

  double operator()(int32_t token) const {
    return (static_cast<double>(logits[token]) - static_cast<double>(logits[best])) / temperature;
  }
};

}  // namespace

void Winner::see(int32_t token, double log_weight, double weight) {
  const double u = uniform(token);
  // -ln(-ln u) <= -ln(1 - u), which tells almost all that lose without a logarithm; the slack is for rounding.
  if (1 - u > weight * scale_) return;
  const double value = log_weight - std::log(-std::log(u));
  if (value < best_ || (value == best_ && token > token_)) return;
  best_ = value;
  token_ = token;
  scale_ = std::exp(-best_) * (1 + 1e-9);
}

// Two tokens share a block of random words.
double Winner::uniform(int32_t token) {
  if (token / 2 != pair_) {
    pair_ = token / 2;
    words_ = philox(key_.seed, {key_.step, key_.position, static_cast<uint32_t>(pair_), kDraws});
  }
  return token % 2 == 0 ? unit(words_[0], words_[1]) : unit(words_[2], words_[3]);
}

// Fills weights_ and total_, which is not finite where a logit is none; returns the best token.
int32_t Sampler::temper(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling) {
  Tempered tempered{logits, left_out == 0 ? 1 : 0, sampling.temperature};
  for (int32_t token = tempered.best; token < vocab_size; ++token)
    if (logits[token] > logits[tempered.best] && token != left_out) tempered.best = token;
  weights_.resize(static_cast<size_t>(vocab_size));
  double total = 0;
  for (int32_t token = 0; token < vocab_size; ++token) {
    const double behind = tempered(token);
    const double weight = behind < -kFarthest || token == left_out ? 0 : std::exp(behind);
    weights_[static_cast<size_t>(token)] = weight;
    total += weight;
  }
  total_ = total;
  return tempered.best;
}

Cut Sampler::find_cut(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling) {
  const int32_t best = temper(logits, vocab_size, left_out, sampling);
  cut(logits, sampling, total_);
  Cut last{logits[best], best};
  for (const int32_t token : kept_)
    if (!last.keeps(logits[token], token)) last = {logits[token], token};
  return last;
}

Draw Sampler::draw(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling, const DrawKey& key,
                   bool with_entropy) {
  const Tempered tempered{logits, temper(logits, vocab_size, left_out, sampling), sampling.temperature};
  if (!std::isfinite(total_)) return {tempered.best, total_, total_, total_};
  kept_.clear();
  if (sampling.top_k > 0 || sampling.top_p < 1) cut(logits, sampling, total_);
  Winner winner(key);
  winner.see(tempered.best, 0, 1);
  double sum = 1, second = 0, product = 0;
  const auto take = [&](int32_t token) {
    const double weight = weights_[static_cast<size_t>(token)];
    if (weight == 0 || token == tempered.best) return;
    sum += weight;
    second = std::max(second, weight);
    if (with_entropy) product += weight * tempered(token);
    winner.see(token, tempered(token), weight);
  };
  if (kept_.empty())
    for (int32_t token = 0; token < vocab_size; ++token) take(token);
  else
    for (const int32_t token : kept_) take(token);
  // ln p is a tempered logit less the sum's logarithm.
  return {winner.token(), weights_[static_cast<size_t>(winner.token())] / sum, (1 - second) / sum, product / sum - std::log(sum)};
}

// Finds what is kept in linear time, by halving the part in which the cut must lie.
void Sampler::cut(const float* logits, const Sampling& sampling, double total) {
  kept_.clear();
  for (size_t token = 0; token < weights_.size(); ++token)
    if (weights_[token] > 0) kept_.push_back(static_cast<int32_t>(token));
  const auto is_before = [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  const auto at = [&](size_t rank) { return kept_.begin() + static_cast<std::ptrdiff_t>(rank); };
  if (sampling.top_k > 0 && static_cast<size_t>(sampling.top_k) < kept_.size()) {
    std::nth_element(kept_.begin(), at(static_cast<size_t>(sampling.top_k)), kept_.end(), is_before);
    kept_.resize(static_cast<size_t>(sampling.top_k));
  }
  if (sampling.top_p >= 1) return;
  // The token of rank `first` is kept, and those from `last` on are not; `before` weigh those in front of `first`.
  size_t first = 0, last = kept_.size();
  for (double before = 0; last - first > 1;) {
    const size_t middle = first + (last - first) / 2;
    std::nth_element(at(first), at(middle), at(last), is_before);
    double sum = before;
    for (size_t rank = first; rank < middle; ++rank) sum += weights_[static_cast<size_t>(kept_[rank])];
    if (sum > sampling.top_p * total) last = middle;
    else first = middle, before = sum;
  }
  kept_.resize(last);
}

}  // namespace dlm
