// A proposer looks at the outputs of a pass. For each scored position, it proposes a token and
// gives the proposal a score. The kinds of proposers are argmax, sampling and constraints.
//
// Each request has its own proposer, so requests with different kinds of proposers can share
// passes. A proposer does not choose which proposals commit: the policy does, by the scores
// (decode/policy.h). exporter/dlm_export/network/proposers.py defines the same interface, with the
// same names.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decode/plan.h"
#include "decode/policy.h"

namespace dlm {

// The outputs that a proposer needs from a pass besides candidates. Candidates are the K most
// likely tokens of each row and their probabilities, best first. If one request of a pass needs an
// output, the pass returns it for all rows.
struct Needs {
  bool entropy = false, logits = false;
};

// A pass's outputs for one request's scored rows, in the order of their positions.
struct Predictions {
  const int32_t* tokens;  // [R, K], never the mask token
  const float* probs;     // [R, K], softmax without the mask token
  const float* entropy;   // [R], sum p ln p; NULL if it was not needed
  const float* logits;    // [R, V], raw logits, including the mask token's; NULL if they were not
                          // needed
};

// The state of a request in a pass that scored some of its positions.
struct Turn {
  const std::vector<int32_t>& canvas;     // the canvas that the pass ran over
  const std::vector<uint8_t>& undecided;  // by canvas position: 1 if it is undecided, otherwise 0
  const std::vector<int32_t>& positions;  // the scored positions, ascending, before the shift
  Range block;                            // the block being decided, which contains the positions
  int32_t passes;                         // number of the request's passes before this one
  bool is_editing;  // true: the positions are decided, but their tokens may be replaced
};

// A proposer's results: one proposal per scored row.
struct Proposals {
  std::vector<int32_t> tokens;  // never the mask token
  std::vector<double> scores;   // higher is more certain: in 0..1, or an entropy of at most 0
  std::vector<double> probs;    // probability of each proposed token in the softmax of the logits
  // Per row: ln p of the best token minus ln p of the proposed token. This is what a constraint
  // costs. The loop fills it.
  std::vector<double> losses;

  void resize(size_t rows) {
    tokens.resize(rows), scores.resize(rows), probs.resize(rows), losses.assign(rows, 0);
  }
};

// A position whose token is known without a pass.
struct Certain {
  int32_t position, token;
};

class Proposer {
 public:
  virtual ~Proposer() = default;

  // The outputs that the proposer needs from the next pass. Called before every pass.
  virtual Needs needs(const Turn& turn) const = 0;

  // Fills `proposals` with one row per position of the turn. The turn has at least one position. A
  // score or probability that is not finite ends the request. In an editing turn, the scores must
  // be the tokens' probabilities.
  virtual void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) = 0;

  // May remove rows from `chosen`, which is sorted by descending score. Unless the turn edits, at
  // least one row must remain.
  virtual void limit(const Turn&, const Proposals&, std::vector<int32_t>& /*chosen*/) const {}

  // Finds the undecided positions of `range` that have only one legal token, and appends them to
  // the last argument. The caller decides them. Called once for the whole canvas before the first
  // pass, and before each pass for the current block.
  virtual void scaffold(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        Range /*range*/, std::vector<Certain>& /*certain*/) {}

  // True if a text that fills the canvas is complete even without an end token.
  virtual bool is_whole() const { return false; }

  // Completes a request that ends early. `guess` has one entry per position: the last pass's
  // proposal for an undecided position, or -1. Replaces each -1 by a token. An entry that is still
  // -1 afterwards becomes an end token.
  virtual void complete(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        std::vector<int32_t>& /*guess*/) {}

  // Called for every token that the request commits or edits, so that the proposer can keep track.
  virtual void note(int32_t /*position*/, int32_t /*token*/) {}
};

// Creates the proposer that the policy asks for. denoiser must outlive the proposer.
std::unique_ptr<Proposer> make_proposer(const Denoiser& denoiser, const Policy& policy);

// Returns a token's probability. It is computed from the token's logit, and from the logit and the
// probability of the row's best token.
double prob_of(int32_t token, const float* logits, int32_t best, float best_prob);

// Computes the policy's score of a row from the denoiser's predictions. `prob` is the probability
// of the proposed token.
double score_row(const Policy& policy, const Turn& turn, const Predictions& predictions,
                 int32_t top_k, size_t row, double prob);

}  // namespace dlm
