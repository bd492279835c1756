#include "decode/proposer.h"

#include <algorithm>
#include <cmath>

#include "decode/random.h"
#include "decode/sampling.h"

namespace dlm {
namespace {

// Proposes the most likely token.
class Argmax final : public Proposer {
 public:
  Argmax(const Denoiser& denoiser, const Policy& policy)
      : top_k_(denoiser.top_k), policy_(policy) {}

  Needs needs(const Turn&) const override { return {policy_.score == Score::entropy, false}; }

  void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) override {
    for (size_t row = 0; row < turn.positions.size(); ++row) {
      const size_t best = row * top_k_;
      proposals.tokens[row] = predictions.tokens[best];
      proposals.probs[row] = predictions.probs[best];
      proposals.scores[row] =
          score_row(policy_, turn, predictions, top_k_, row, predictions.log_odds_at(best));
    }
  }

 private:
  const int32_t top_k_;
  const Policy policy_;
};

// Proposes a sampled token for each position.
class Sampled final : public Proposer {
 public:
  Sampled(const Denoiser& denoiser, const Policy& policy) : denoiser_(denoiser), policy_(policy) {}

  Needs needs(const Turn&) const override {
    return {policy_.score == Score::entropy && policy_.score_of != ScoreOf::draw, true};
  }

  void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) override {
    const size_t top_k = denoiser_.top_k, width = denoiser_.vocab_size;
    const Sampling sampling{turn.temperature, policy_.top_p, policy_.top_k};
    for (size_t row = 0; row < turn.positions.size(); ++row) {
      const float* const logits = predictions.logits + row * width;
      const DrawKey key{policy_.seed, static_cast<uint32_t>(turn.passes),
                        static_cast<uint32_t>(turn.positions[row])};
      const Draw draw = sampler_.draw(logits, denoiser_.vocab_size, denoiser_.mask_token_id,
                                      sampling, key, told());
      proposals.tokens[row] = draw.token;
      const size_t best = row * top_k;
      const int32_t best_token = predictions.tokens[best];
      proposals.probs[row] = prob_of(draw.token, logits, best_token, predictions.probs[best]);
      proposals.scores[row] =
          std::isfinite(draw.prob)
              ? score(turn, predictions, row,
                      log_odds_of(draw.token, logits, best_token, predictions.log_odds_at(best)),
                      draw)
              : draw.prob;
    }
  }

 private:
  // Returns which fields of a Draw the policy's score needs.
  Told told() const {
    if (policy_.score_of != ScoreOf::draw || policy_.score == Score::random) return Told::token;
    return policy_.score == Score::entropy ? Told::entropy : Told::distribution;
  }

  double score(const Turn& turn, const Predictions& predictions, size_t row, double log_odds,
               const Draw& draw) const {
    if (told() == Told::token)
      return score_row(policy_, turn, predictions, denoiser_.top_k, row, log_odds);
    if (turn.is_edit(row)) return score_of(draw.prob);
    return policy_.score == Score::entropy
               ? draw.entropy
               : score_of(policy_.score == Score::margin ? draw.margin : draw.prob);
  }

  const Denoiser& denoiser_;
  const Policy policy_;
  Sampler sampler_;
};

}  // namespace

std::unique_ptr<Proposer> make_proposer(const Denoiser& denoiser, const Policy& policy) {
  if (policy.select == Select::sample) return std::make_unique<Sampled>(denoiser, policy);
  return std::make_unique<Argmax>(denoiser, policy);
}

double prob_of(int32_t token, const float* logits, int32_t best, float best_prob) {
  return best_prob *
         std::exp(static_cast<double>(logits[token]) - static_cast<double>(logits[best]));
}

double log_odds_of(int32_t token, const float* logits, int32_t best, double best_log_odds) {
  const double behind = static_cast<double>(logits[token]) - static_cast<double>(logits[best]);
  if (behind >= 0) return best_log_odds;
  // exp(-best_log_odds) is the sum of all other exponentials, divided by that of the best token.
  return behind - std::log(std::exp(-best_log_odds) - std::expm1(behind));
}

size_t rank_tokens(const Denoiser& denoiser, const float* logits, size_t count, int32_t* best) {
  size_t found = 0;
  for (int32_t token = 0; token < denoiser.vocab_size; ++token) {
    if (token == denoiser.mask_token_id) continue;
    if (found == count && !(logits[token] > logits[best[count - 1]])) continue;
    size_t rank = found < count ? found++ : count - 1;
    for (; rank > 0 && logits[token] > logits[best[rank - 1]]; --rank) best[rank] = best[rank - 1];
    best[rank] = token;
  }
  return found;
}

double score_margin(const Predictions& predictions, int32_t top_k, size_t row) {
  const size_t best = row * top_k;
  const float* const odds = predictions.log_odds + best;
  if (!std::isfinite(odds[0]) || !std::isfinite(odds[1]))
    return score_of(static_cast<double>(predictions.probs[best]) -
                    static_cast<double>(predictions.probs[best + 1]));
  const auto log_prob = [](double log_odds) {
    return log_odds > 0 ? -std::log1p(std::exp(-log_odds))
                        : log_odds - std::log1p(std::exp(log_odds));
  };
  // Let e be the exponential of the second token and s the sum of all but the best token's, both
  // divided by the best token's. Then the odds of the margin are (1 - e) / (s + e).
  const double log_e = std::min(log_prob(odds[1]) - log_prob(odds[0]), 0.0), log_s = -odds[0];
  return score_of_log_odds(std::log(-std::expm1(log_e)) - log_s -
                           std::log1p(std::exp(log_e - log_s)));
}

double score_row(const Policy& policy, const Turn& turn, const Predictions& predictions,
                 int32_t top_k, size_t row, double log_odds) {
  if (turn.is_edit(row)) return score_of_log_odds(log_odds);
  switch (policy.score) {
    case Score::confidence:
      break;
    case Score::margin:
      return score_margin(predictions, top_k, row);
    case Score::entropy:  // fp32 cannot hold much smaller numbers, so they count as 0
      return std::fabs(predictions.entropy[row]) < 1e-30f ? 0 : predictions.entropy[row];
    case Score::random:
      return score_of(random_score(policy.seed, static_cast<uint32_t>(turn.passes),
                                   static_cast<uint32_t>(turn.positions[row])));
  }
  return score_of_log_odds(log_odds);
}

}  // namespace dlm
