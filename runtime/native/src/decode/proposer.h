// The seam between a pass and the choice of what commits: for each scored row a proposer gives the
// token that its position would take, and a score. Argmax, draws and constraints are kinds of it.
//
// Each request has its own, which lives as long as it does, so that requests of different kinds
// share passes. The choice itself (decode/policy.h) stays pure: it ranks scores.
// exporter/dlm_export/network/proposers.py states the same seam, with the same names.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "decode/plan.h"
#include "decode/policy.h"

namespace dlm {

// What a proposer needs of a pass beside candidates (K tokens a row with their probabilities, best
// first). All rows of a pass get what one of its requests needs.
struct Needs {
  bool entropy = false, logits = false;
};

// What a pass says of a request's scored rows, in the order of their positions.
struct Predictions {
  const int32_t* tokens;  // [R, K], never the mask token
  const float* probs;     // [R, K], softmax with the mask token excluded
  const float* entropy;   // [R], sum p ln p; NULL unless it was needed
  const float* logits;    // [R, V], raw, not to be read for the mask token; NULL unless needed
};

// A pass that scored positions of a request.
struct Turn {
  const std::vector<int32_t>& canvas;     // as the pass saw it
  const std::vector<uint8_t>& undecided;  // by position of the canvas, 1 or 0
  const std::vector<int32_t>& positions;  // of the rows, ascending; whatever the denoiser's shift
  Range block;                            // being decided; the positions lie in it
  int32_t passes;                         // made before
  bool is_editing;                        // the positions are decided, and may change
};

// What is proposed, by row.
struct Proposals {
  std::vector<int32_t> tokens;  // never the mask token
  std::vector<double> scores;   // higher is surer: in 0..1, or an entropy of at most 0
  std::vector<double> probs;    // of the tokens, in the softmax of what the denoiser said
  std::vector<double> losses;   // ln p of the row's best token minus ln p of the proposed one,
                                // filled by the loop: what a constraint costs

  void resize(size_t rows) {
    tokens.resize(rows), scores.resize(rows), probs.resize(rows), losses.assign(rows, 0);
  }
};

// A token that no pass has to be asked for.
struct Certain {
  int32_t position, token;
};

class Proposer {
 public:
  virtual ~Proposer() = default;

  // Asked before every pass of the request.
  virtual Needs needs(const Turn& turn) const = 0;

  // Fills `proposals`, which has as many rows as the turn has positions, at least one. Values that
  // are not finite end the request. An edit's scores are the proposed tokens' probabilities.
  virtual void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) = 0;

  // May take rows out of `chosen`, surest first. One at least has to stay, unless the turn edits.
  virtual void limit(const Turn&, const Proposals&, std::vector<int32_t>& /*chosen*/) const {}

  // Adds the undecided positions of `range` that have only one legal token; they are then decided.
  // Called for the canvas before the first pass, and for a block before each of its passes.
  virtual void scaffold(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        Range /*range*/, std::vector<Certain>& /*certain*/) {}

  // Whether the text is whole once all is decided, though there was no room for an end token.
  virtual bool is_whole() const { return false; }

  // For a request that ends early. `guess` has what the last pass proposed for undecided positions,
  // else -1. Replaces -1 by the token that the position takes; -1 becomes an end token.
  virtual void complete(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        std::vector<int32_t>& /*guess*/) {}

  // Called for every token that the request decides or edits.
  virtual void note(int32_t /*position*/, int32_t /*token*/) {}
};

// The proposer that a policy asks for. denoiser must outlive it.
std::unique_ptr<Proposer> make_proposer(const Denoiser& denoiser, const Policy& policy);

// The probability of a token by its row's logits, from that of the row's best one.
double prob_of(int32_t token, const float* logits, int32_t best, float best_prob);

// The policy's score of a row, by the denoiser's predictions. prob: of the proposed token.
double score_row(const Policy& policy, const Turn& turn, const Predictions& predictions,
                 int32_t top_k, size_t row, double prob);

}  // namespace dlm
