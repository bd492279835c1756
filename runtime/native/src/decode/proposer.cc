#include "decode/proposer.h"

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
          score_row(policy_, turn, predictions, top_k_, row, proposals.probs[row]);
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
      proposals.probs[row] = prob_of(draw.token, logits, predictions.tokens[row * top_k],
                                     predictions.probs[row * top_k]);
      proposals.scores[row] = std::isfinite(draw.prob)
                                  ? score(turn, predictions, row, proposals.probs[row], draw)
                                  : draw.prob;
    }
  }

 private:
  // Returns which fields of a Draw the policy's score needs.
  Told told() const {
    if (policy_.score_of != ScoreOf::draw || policy_.score == Score::random) return Told::token;
    return policy_.score == Score::entropy ? Told::entropy : Told::distribution;
  }

  double score(const Turn& turn, const Predictions& predictions, size_t row, double prob,
               const Draw& draw) const {
    if (told() == Told::token)
      return score_row(policy_, turn, predictions, denoiser_.top_k, row, prob);
    if (turn.is_edit(row)) return draw.prob;
    return policy_.score == Score::entropy  ? draw.entropy
           : policy_.score == Score::margin ? draw.margin
                                            : draw.prob;
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

double score_row(const Policy& policy, const Turn& turn, const Predictions& predictions,
                 int32_t top_k, size_t row, double prob) {
  if (turn.is_edit(row)) return prob;
  const float* const probs = predictions.probs + row * top_k;
  switch (policy.score) {
    case Score::confidence:
      return prob;
    case Score::margin:
      return probs[0] - probs[1];
    case Score::entropy:
      return predictions.entropy[row];
    case Score::random:
      return random_score(policy.seed, static_cast<uint32_t>(turn.passes),
                          static_cast<uint32_t>(turn.positions[row]));
  }
  return prob;
}

}  // namespace dlm
