// Defines Constrained, the proposer of a request with a constraint. After each pass, the proposer
// finds one text that the automaton accepts. This text is the most likely text, or a random sample.
// All proposals come from this text, so any number of proposals can commit at the same time. If a
// request ends early, the proposer completes the request's text with as few tokens as possible. In
// doing so, the proposer keeps the tokens that the last pass proposed.
//
// The constraint covers a range of the canvas. The range starts at the request's first undecided
// position and ends at the last undecided position. The range also includes the `given` tokens
// before the first undecided position. If the caller has decided positions inside the range, their
// tokens belong to the text too. If the canvas grows, the range ends at the last position that the
// canvas can get. After each block, the proposer makes sure that the remaining positions have room
// for the rest of the text.
#pragma once

#include <memory>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/marginals.h"
#include "constraints/option_probs.h"
#include "constraints/viterbi.h"
#include "decode/proposer.h"

namespace dlm {

class Constrained final : public Proposer {
 public:
  // The constrained text starts `given` tokens before the first undecided position. `denoiser` must
  // outlive the proposer. Throws an Error with status DLM_INVALID_ARGUMENT if no text of the
  // constraint fits into the canvas. Throws an Error with status DLM_UNSUPPORTED if the automaton
  // was made for a different vocabulary.
  Constrained(const Denoiser& denoiser, const Policy& policy,
              std::shared_ptr<const Automaton> automaton, int32_t given,
              const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided);

  Needs needs(const Turn& turn) const override;
  void propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) override;
  void find_best(const Turn& turn, const Predictions& predictions,
                 std::vector<int32_t>& tokens) override;
  void scaffold(const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided,
                Range range, std::vector<Certain>& certain) override;
  void complete(const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided,
                std::vector<int32_t>& guess) override;
  bool is_whole() const override { return true; }
  const std::vector<double>* option_probs() const override {
    return answered_block_ < 0 ? nullptr : &options_->probs();
  }
  void note(int32_t position, int32_t token) override;

 private:
  int32_t look_at(const Turn& turn, const Predictions& predictions);
  void find_text(const Turn& turn, int32_t state, const std::vector<uint8_t>& ends);
  void find_causal_text(const Turn& turn, int32_t first);
  Sampling drawn_at(const Turn& turn) const {
    return {turn.temperature, policy_.top_p, policy_.top_k};
  }
  // Returns true if the score of a token is computed from the probabilities of whole texts. Returns
  // false if it is computed only from the prediction for the token's position.
  bool scores_texts() const;
  double score_of_texts(const Marginal& found) const;
  // Returns the first undecided position of the range. If the canvas contains no such position,
  // returns the end of the range or of the canvas.
  int32_t first_open(const std::vector<uint8_t>& undecided) const;
  int32_t state_before(int32_t position, const std::vector<int32_t>& canvas);
  std::vector<uint8_t> ends_behind(int32_t position, const std::vector<int32_t>& canvas,
                                   const std::vector<uint8_t>& undecided);
  void fill_places(int32_t first, int32_t last, const std::vector<int32_t>& canvas,
                   const std::vector<uint8_t>& undecided);

  const Denoiser& denoiser_;
  const Policy policy_;
  const std::shared_ptr<const Automaton> automaton_;
  Range range_;  // the canvas positions that the constraint covers
  // For each position of range_: the automaton's state before the position. The list contains only
  // the states that are already known.
  std::vector<int32_t> states_;
  Viterbi viterbi_;
  Texts texts_;
  std::vector<Place> places_;
  std::vector<int32_t> path_, only_;
  std::vector<Marginal> marginals_;
  std::unique_ptr<OptionProbs> options_;  // NULL if the constraint is not a decision
  // The first position of the last block that add_block() has processed.
  int32_t answered_block_ = -1;
};

}  // namespace dlm
