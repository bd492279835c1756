// A proposer uses the outputs of a pass to propose one token for each scored position, and gives
// each proposal a score. Different proposers choose the most likely token (argmax), sample a token,
// or choose tokens that satisfy a constraint.
//
// Each request has its own proposer, so requests with different kinds of proposers can share
// passes. The policy then uses the scores to choose which proposals commit (decode/policy.h).
// exporter/dlm_export/network/proposers.py defines the same interface, with the same names.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "decode/pass_plan.h"
#include "decode/policy.h"

namespace dlm {

// The outputs that a proposer needs from a pass. Every pass also returns candidates, so this struct
// does not list them. The candidates of a row are its K most likely tokens with their
// probabilities, most likely token first. If one request needs an output, the pass returns this
// output for the rows of all requests.
struct Needs {
  bool entropy = false, logits = false, conditioning = false;
  // The tokens that Proposer::set_draws asks for. The pass draws them on the device if it can.
  // Otherwise, it returns the logits.
  bool draws = false;

  bool computes_logits() const { return logits || draws; }
};

// The outputs of a pass for the R positions of one request whose tokens the pass predicts. Each
// position has one row, and the rows are in the order of the positions.
struct Predictions {
  const int32_t* tokens;  // [R, K], never the mask token
  // [R, K], the probabilities of the candidates; the softmax leaves out the mask token.
  const float* probs;
  // [R, K], ln(p / (1 - p)) for each of these probabilities p, or NaN if the engine does not know
  // it
  const float* log_odds;
  const float* entropy;  // [R], the sum of p ln p; NULL if no request needs it
  // [R, V], raw logits, including the logit of the mask token; NULL if no request needs the logits.
  const float* logits;
  // [R, C], the self-conditioning for the next pass over the block; NULL if no request needs it
  const float* next_conditioning = nullptr;
  const Drawn* draws = nullptr;  // [R]; NULL if the proposer must draw from the logits

  // Returns the outputs for the positions from number `row` on.
  Predictions from(size_t row, const Denoiser& denoiser) const {
    const auto after = [&](auto* all, size_t width) {
      return all == nullptr ? nullptr : all + row * width;
    };
    const size_t k = denoiser.top_k;
    return {after(tokens, k),
            after(probs, k),
            after(log_odds, k),
            after(entropy, 1),
            after(logits, denoiser.vocab_size),
            after(next_conditioning, denoiser.passed_conditioning()),
            after(draws, 1)};
  }
  // Returns the log odds of a candidate. `at` is an index into `probs`.
  double log_odds_at(size_t at) const {
    return std::isnan(log_odds[at]) ? log_odds_of(probs[at]) : log_odds[at];
  }
};

// The part of a request's state that a proposer sees after a pass.
struct Turn {
  const std::vector<int32_t>& canvas;     // the canvas that the pass ran over
  const std::vector<uint8_t>& undecided;  // 1 for each undecided position, otherwise 0
  const std::vector<int32_t>& positions;  // the scored positions, in ascending order
  Range block;                            // the block being decided, which contains the positions
  // Number of passes that the request made before this pass. With remask "noise", number of passes
  // over the block. Random numbers depend on this number.
  int32_t passes;
  double temperature;  // the temperature for draws, see temperature_of
  // True if the pass verifies drafted tokens. Then attention is causal, and the prediction for a
  // position depends only on the tokens before it.
  bool is_causal;

  // Returns true if the position of a row is already decided, and the pass may replace its token.
  bool is_edit(size_t row) const { return undecided[positions[row]] == 0; }
};

// A proposer's results: one proposal per scored row.
struct Proposals {
  std::vector<int32_t> tokens;  // proposed tokens, never the mask token
  // A higher score means a more certain proposal. Scores are (negative) entropies, or have been
  // made by score_of or score_of_log_odds.
  std::vector<double> scores;
  std::vector<double> probs;  // the softmax probability of each proposed token
  // For each row, how much the constraint lowers the log probability: ln p of the most likely token
  // minus ln p of the proposed token. The decoding loop fills this array, not the proposer.
  std::vector<double> losses;

  void resize(size_t rows) {
    tokens.resize(rows), scores.resize(rows), probs.resize(rows), losses.assign(rows, 0);
  }
};

// A position whose token is known without a pass, because only one token is legal at this position.
struct Certain {
  int32_t position, token;
};

class Proposer {
 public:
  virtual ~Proposer() = default;

  // Returns the outputs that the proposer needs from the next pass. The request calls this function
  // before every pass.
  virtual Needs needs(const Turn& turn) const = 0;

  // Sets what the engine draws from each row of the next pass, if the engine draws. `rows` has one
  // entry for each position.
  virtual void set_draws(const Turn& /*turn*/, DrawRow* /*rows*/) const {}

  // Fills `proposals` with one row for each position of the turn. There is at least one position.
  // If a score is NaN or a probability is not finite, the request ends with an error. If
  // turn.is_edit(row) is true, the score of the row must be that of the proposed token's
  // probability.
  virtual void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) = 0;

  // `tokens` contains the most likely token of each row. A proposer that does not allow all texts
  // replaces them by the most likely text that it allows. A request calls this function only with
  // remask "noise", after propose().
  virtual void find_best(const Turn& /*turn*/, const Predictions&,
                         std::vector<int32_t>& /*tokens*/) {}

  // Finds the undecided positions of `range` that have only one legal token, and appends them to
  // the last argument. The caller then commits these tokens. A request calls this function for the
  // whole canvas before the first pass, and for the current block before each later pass.
  virtual void scaffold(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        Range /*range*/, std::vector<Certain>& /*certain*/) {}

  // Returns true if a text in which all positions are decided is complete even without an end
  // token.
  virtual bool is_whole() const { return false; }

  // Completes a request that ends early. `guess` contains one entry for each position of the
  // canvas. If the last pass proposed a token for an undecided position, the entry of this position
  // is that token. All other entries are -1. The function replaces each -1 of an undecided position
  // with a token, if possible. If an entry stays -1, the caller uses an end token for its position.
  virtual void complete(const std::vector<int32_t>& /*canvas*/, const std::vector<uint8_t>&,
                        std::vector<int32_t>& /*guess*/) {}

  // For decisions: returns the probability of each option of all questions. Returns NULL if the
  // probabilities are not known.
  virtual const std::vector<double>* option_probs() const { return nullptr; }

  // Called for every token that the request commits or replaces, so that the proposer can follow
  // the canvas.
  virtual void note(int32_t /*position*/, int32_t /*token*/) {}
};

// Creates the proposer that the policy selects. `denoiser` must outlive the proposer.
std::unique_ptr<Proposer> make_proposer(const Denoiser& denoiser, const Policy& policy);

// Returns the logit of `token` minus that of the row's best token.
inline double behind_of(int32_t token, const float* logits, int32_t best) {
  return static_cast<double>(logits[token]) - static_cast<double>(logits[best]);
}

// Returns the probability of a token. The function computes it from the token's logit minus that of
// the row's best token, and from the probability of the best token.
double prob_behind(double behind, float best_prob);

// Finds the `count` most likely tokens of a row of logits, most likely first. Tokens with equal
// logits are sorted by ascending id. The function skips the mask token. Returns the number of
// tokens found, which may be less than `count`.
size_t rank_tokens(const Denoiser& denoiser, const float* logits, size_t count, int32_t* best);

// Returns the score of the margin between the two best tokens of a row, p1 - p2.
double score_margin(const Predictions& predictions, int32_t top_k, size_t row);

// Computes the policy's score of a row from the denoiser's predictions. `log_odds` are the log odds
// of the proposed token.
double score_row(const Policy& policy, const Turn& turn, const Predictions& predictions,
                 int32_t top_k, size_t row, double log_odds);

}  // namespace dlm
