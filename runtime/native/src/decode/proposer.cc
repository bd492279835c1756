#include "decode/proposer.h"

#include <algorithm>
#include <cmath>

#include "base/random.h"
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
    Needs found;
    found.entropy = policy_.score == Score::entropy && policy_.score_of != ScoreOf::draw;
    found.draws = true;
    return found;
  }

  void set_draws(const Turn& turn, DrawRow* rows) const override {
    for (size_t row = 0; row < turn.positions.size(); ++row) rows[row] = wanted(turn, row);
  }

  void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) override {
    for (size_t row = 0; row < turn.positions.size(); ++row) {
      const auto& [draw, behind] =
          predictions.draws != nullptr ? predictions.draws[row] : draw_here(turn, predictions, row);
      const size_t best = row * denoiser_.top_k;
      proposals.tokens[row] = draw.token;
      proposals.probs[row] = prob_behind(behind, predictions.probs[best]);
      proposals.scores[row] =
          std::isfinite(draw.prob)
              ? score(turn, predictions, row,
                      log_odds_behind(behind, predictions.log_odds_at(best)), draw)
              : draw.prob;
    }
  }

 private:
  DrawRow wanted(const Turn& turn, size_t row) const {
    DrawRow found{};
    found.sampling = {turn.temperature, policy_.top_p, policy_.top_k};
    found.key = {policy_.seed, static_cast<uint32_t>(turn.passes),
                 static_cast<uint32_t>(turn.positions[row])};
    found.told = told();
    return found;
  }

  Drawn draw_here(const Turn& turn, const Predictions& predictions, size_t row) {
    const float* const logits = predictions.logits + row * denoiser_.vocab_size;
    const DrawRow found = wanted(turn, row);
    const Draw draw = sampler_.draw(logits, denoiser_.vocab_size, denoiser_.mask_token_id,
                                    found.sampling, found.key, found.told);
    return {draw, behind_of(draw.token, logits, predictions.tokens[row * denoiser_.top_k])};
  }

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

double prob_behind(double behind, float best_prob) { return best_prob * std::exp(behind); }

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
