#include "sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "random.h"

namespace dlm {
namespace {

// A token whose tempered logit is farther behind the best one's cannot win: noise spans less than 42, from -ln(53 ln 2) to 53 ln 2.
constexpr double kFarthest = 42;

// The largest of what it is shown.
class Winner {
 public:
  Winner(const Sampling& sampling, Place place) : sampling_(sampling), place_(place) {}

  // behind: (l - best) / T; weight: its exponential.
  void see(int32_t token, double behind, double weight) {
    const double u = uniform(token);
    // -ln(-ln u) <= -ln(1 - u), which tells almost all that lose without a logarithm; the slack is for rounding.
    if (1 - u > weight * scale_) return;
    const double value = behind - std::log(-std::log(u));
    if (value < best_ || (value == best_ && token > token_)) return;
    best_ = value;
    token_ = token;
    scale_ = std::exp(-best_) * (1 + 1e-9);
  }
  int32_t token() const { return token_; }

 private:
  // Two tokens share a block of random words.
  double uniform(int32_t token) {
    if (token / 2 != pair_) {
      pair_ = token / 2;
      words_ = philox(sampling_.seed, {place_.step, place_.position, static_cast<uint32_t>(pair_), kDraws});
    }
    return token % 2 == 0 ? unit(words_[0], words_[1]) : unit(words_[2], words_[3]);
  }

  const Sampling& sampling_;
  const Place place_;
  std::array<uint32_t, 4> words_{};
  int32_t pair_ = -1, token_ = 0;
  double best_ = -std::numeric_limits<double>::infinity(), scale_ = std::numeric_limits<double>::infinity();
};

}  // namespace

Draw Sampler::draw(const float* logits, int32_t vocab_size, int32_t left_out, const Sampling& sampling, Place place) {
  const int32_t first = left_out == 0 ? 1 : 0;
  int32_t best = first;
  for (int32_t token = first; token < vocab_size; ++token)
    if (token != left_out && logits[token] > logits[best]) best = token;
  const auto behind = [&](int32_t token) {
    return (static_cast<double>(logits[token]) - static_cast<double>(logits[best])) / sampling.temperature;
  };
  weights_.resize(static_cast<size_t>(vocab_size));
  double total = 0;
  for (int32_t token = 0; token < vocab_size; ++token) {
    const double distance = token == left_out ? -kFarthest - 1 : behind(token);
    const double weight = distance < -kFarthest ? 0 : std::exp(distance);
    weights_[static_cast<size_t>(token)] = weight;
    total += weight;
  }
  if (!std::isfinite(total)) return {best, total, total, total};
  Winner winner(sampling, place);
  winner.see(best, 0, 1);
  double sum = 0, second = 0, entropy = 0;
  const auto take = [&](int32_t token) {
    const double weight = weights_[static_cast<size_t>(token)];
    if (weight == 0) return;
    sum += weight;
    if (token != best) second = std::max(second, weight), winner.see(token, behind(token), weight);
  };
  const auto each = [&](const auto& visit) {
    if (kept_.empty())
      for (int32_t token = 0; token < vocab_size; ++token) visit(token);
    else
      for (const int32_t token : kept_) visit(token);
  };
  cut(logits, sampling, total);
  each(take);
  each([&](int32_t token) {
    const double prob = weights_[static_cast<size_t>(token)] / sum;
    if (prob > 0) entropy += prob * std::log(prob + 1e-10);
  });
  return {winner.token(), weights_[static_cast<size_t>(winner.token())] / sum, (1 - second) / sum, entropy};
}

void Sampler::cut(const float* logits, const Sampling& sampling, double total) {
  kept_.clear();
  if (sampling.top_k == 0 && sampling.top_p >= 1) return;
  // Those below this weigh less together than what top_p leaves out; the slack is for rounding.
  const double least = total * (1 - sampling.top_p) / static_cast<double>(weights_.size()) * 0.99;
  for (size_t token = 0; token < weights_.size(); ++token)
    if (weights_[token] > 0 && weights_[token] >= least) kept_.push_back(static_cast<int32_t>(token));
  const auto is_before = [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  const size_t most = sampling.top_k == 0 ? kept_.size() : std::min(kept_.size(), static_cast<size_t>(sampling.top_k));
  std::partial_sort(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(most), kept_.end(), is_before);
  size_t count = 0;
  for (double before = 0; count < most && (count == 0 || before <= sampling.top_p * total); ++count)
    before += weights_[static_cast<size_t>(kept_[count])];
  kept_.resize(count);
}

}  // namespace dlm
