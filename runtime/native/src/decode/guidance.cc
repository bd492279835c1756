#include "decode/guidance.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace dlm {

Predictions Guided::guide(const Denoiser& denoiser, double scale, const Predictions& conditional,
                          const float* unconditional, size_t rows) {
  logits_.resize(rows * denoiser.vocab_size);
  for (size_t i = 0; i < logits_.size(); ++i)
    logits_[i] = guided_logit(conditional.logits[i], unconditional[i], scale);
  return predict(denoiser, logits_.data(), rows);
}

Predictions Guided::predict(const Denoiser& denoiser, const float* logits, size_t rows) {
  const size_t width = denoiser.vocab_size, top_k = denoiser.top_k;
  tokens_.assign(rows * top_k, 0);
  probs_.assign(rows * top_k, 0);
  log_odds_.assign(rows * top_k, std::numeric_limits<float>::quiet_NaN());
  entropy_.assign(rows, 0);
  for (size_t row = 0; row < rows; ++row) rank(denoiser, logits + row * width, row);
  return {tokens_.data(), probs_.data(), log_odds_.data(), entropy_.data(), logits};
}

void Guided::rank(const Denoiser& denoiser, const float* logits, size_t row) {
  const size_t top_k = denoiser.top_k;
  int32_t* const best = tokens_.data() + row * top_k;
  const size_t count = rank_tokens(denoiser, logits, top_k, best);
  // If one of the logits is NaN, `others` becomes NaN below, and so do all probabilities. This code
  // handles rows whose best logit is infinite.
  if (std::isinf(logits[best[0]])) {
    std::fill_n(probs_.data() + row * top_k, top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const auto behind = [&](int32_t token) {
    return static_cast<double>(logits[token]) - static_cast<double>(logits[best[0]]);
  };
  double others = 0, product = 0;  // sums over all tokens but the best one
  for (int32_t token = 0; token < denoiser.vocab_size; ++token) {
    if (token == denoiser.mask_token_id || token == best[0]) continue;
    const double weight = std::exp(behind(token));
    if (weight == 0) continue;
    others += weight;
    product += weight * behind(token);
  }
  for (size_t i = 0; i < count; ++i) {
    probs_[row * top_k + i] = static_cast<float>(std::exp(behind(best[i])) / (1 + others));
    log_odds_[row * top_k + i] =
        static_cast<float>(log_odds_behind(behind(best[i]), -std::log(others)));
  }
  entropy_[row] = static_cast<float>(product / (1 + others) - std::log1p(others));
}

}  // namespace dlm
