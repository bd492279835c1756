#include "proposer.h"

#include "loop.h"
#include "random.h"

namespace dlm {
namespace {

// The best token.
class Argmax final : public Proposer {
 public:
  Argmax(const Denoiser& denoiser, const Policy& policy) : top_k_(denoiser.top_k), policy_(policy) {}

  Needs needs(const Turn& turn) const override { return {!turn.is_editing && policy_.needs_entropy(), false}; }

  void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) override {
    for (size_t row = 0; row < turn.positions.size(); ++row) {
      const size_t best = row * static_cast<size_t>(top_k_);
      proposals.tokens[row] = predictions.tokens[best];
      proposals.probs[row] = predictions.probs[best];
      proposals.scores[row] = score_of(policy_, turn, predictions, top_k_, row, proposals.probs[row]);
    }
  }

 private:
  const int32_t top_k_;
  const Policy policy_;
};

}  // namespace

void Proposer::limit(const Turn&, const Proposals&, std::vector<int32_t>&) const {}

void Proposer::note(int32_t, int32_t) {}

std::unique_ptr<Proposer> make_proposer(const Denoiser& denoiser, const Policy& policy) {
  return std::make_unique<Argmax>(denoiser, policy);
}

double score_of(const Policy& policy, const Turn& turn, const Predictions& predictions, int32_t top_k, size_t row, double prob) {
  if (turn.is_editing) return prob;
  const float* const probs = predictions.probs + row * static_cast<size_t>(top_k);
  switch (policy.score) {
    case Score::confidence: return prob;
    case Score::margin: return probs[0] - probs[1];
    case Score::entropy: return predictions.entropy[row];
    case Score::random:
      return random_score(policy.seed, static_cast<uint32_t>(turn.passes), static_cast<uint32_t>(turn.positions[row]));
  }
  return prob;
}

}  // namespace dlm
