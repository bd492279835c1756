// A proposer gives each scored row the token that its position would take, and a score. The
// kinds are argmax, sampling and constraints.
//
// Each request has its own proposer for its lifetime, so requests of different kinds share passes.
// The choice of commits (decode/policy.h) stays pure: it ranks scores.
// exporter/dlm_export/network/proposers.py defines the same interface, with the same names.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decode/plan.h"
#include "decode/policy.h"

namespace dlm {

// The outputs of a pass that a proposer needs besides candidates (K tokens a row with their
// probabilities, best first). If one request needs an output, all rows of the pass get it.
struct Needs {
  bool entropy = false, logits = false;
};

// A pass's outputs for one request's scored rows, in the order of their positions.
struct Predictions {
  const int32_t* tokens;  // [R, K], never the mask token
  const float* probs;     // [R, K], softmax with the mask token excluded
  const float* entropy;   // [R], sum p ln p; NULL unless needed
  const float* logits;    // [R, V], raw; ignore the mask token's; NULL unless needed
};

// A pass that scored positions of a request.
struct Turn {
  const std::vector<int32_t>& canvas;     // as the pass saw it
  const std::vector<uint8_t>& undecided;  // by position of the canvas, 1 or 0
  const std::vector<int32_t>& positions;  // of the rows, ascending, before the shift
  Range block;                            // the block being decided; holds the positions
  int32_t passes;                         // made before this one
  bool is_editing;                        // the positions are decided, but may change
};

// The proposals, one per row.
struct Proposals {
  std::vector<int32_t> tokens;  // never the mask token
  std::vector<double> scores;   // higher is surer: in 0..1, or an entropy of at most 0
  std::vector<double> probs;    // probability of each token in the softmax of the logits
  std::vector<double> losses;   // ln p of the row's best token minus ln p of the proposed one: the
                                // cost of a constraint, filled by the loop

  void resize(size_t rows) {
    tokens.resize(rows), scores.resize(rows), probs.resize(rows), losses.assign(rows, 0);
  }
};

// A token that is decided without a pass.
struct Certain {
  int32_t position, token;
};

class Proposer {
 public:
  virtual ~Proposer() = default;

  // Called before every pass of the request.
  virtual Needs needs(const Turn& turn) const = 0;

  // Fills `proposals`, which has one row per position of the turn, at least one. A value that is
  // not finite ends the request. When editing, scores are the tokens' probabilities.
  virtual void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) = 0;

  // May remove rows from `chosen` (surest first). At least one must stay, unless the turn edits.
  virtual void limit(const Turn&, const Proposals&, std::vector<int32_t>& /*chosen*/) const {}

  // Appends the undecided positions of `range` that have only one legal token; the caller decides
  // them. Called for the canvas before the first pass, and for a block before each of its passes.
  virtual void scaffold(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        Range /*range*/, std::vector<Certain>& /*certain*/) {}

  // True if a fully decided text is complete even if it had no room for an end token.
  virtual bool is_whole() const { return false; }

  // Completes a request that ends early. `guess` holds the last pass's proposals for undecided
  // positions, otherwise -1. Replaces each -1 by a token; one that stays becomes an end token.
  virtual void complete(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        std::vector<int32_t>& /*guess*/) {}

  // Called for every token that the request commits or edits.
  virtual void note(int32_t /*position*/, int32_t /*token*/) {}
};

// Creates the policy's proposer. denoiser must outlive it.
std::unique_ptr<Proposer> make_proposer(const Denoiser& denoiser, const Policy& policy);

// The probability of a token, from its logit and the logit and probability of the row's best token.
double prob_of(int32_t token, const float* logits, int32_t best, float best_prob);

// The policy's score of a row, from the denoiser's predictions. prob: of the proposed token.
double score_row(const Policy& policy, const Turn& turn, const Predictions& predictions,
                 int32_t top_k, size_t row, double prob);

}  // namespace dlm
