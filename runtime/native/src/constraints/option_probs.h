// The probability of each option of the questions of a decision (compile/decisions.h).
//
// In a block, the probability of an option is the sum of the probabilities of the texts with this
// option. A text that has not completed an option at the end of the block counts equally for all
// options that can still follow. If the question is still open in the next block, the texts of the
// next block divide the probability among the options that agree with the committed tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/marginals.h"

namespace dlm {

class OptionProbs {
 public:
  // The automaton must be compiled from a decision, and must outlive this object. `room` is the
  // number of tokens for the answer and for the text after the answer.
  OptionProbs(const Automaton& automaton, int32_t room);

  // Adds the texts of a block. These texts start in `state`, and `texts` contains their sums.
  // `room` is the number of tokens from the start of the block on. `room_behind` is the number of
  // tokens after the end of the block.
  void add_block(int32_t state, int32_t room, Texts& texts, int32_t room_behind);

  // By option.
  const std::vector<double>& probs() const { return probs_; }

 private:
  // Sets follows_ to 1 for each option that a text can still complete after `state`, so that the
  // whole answer fits into `room` tokens.
  void find_following(int32_t state, int32_t room);
  // Returns the number of options of a question that follows_ marks with 1.
  double count_following(size_t question) const;

  const Automaton& automaton_;
  std::vector<double> probs_, found_, visits_, last_;
  std::vector<uint8_t> follows_;  // one entry for each option
  std::vector<int32_t> steps_;    // by state: the fewest tokens that lead there; -1: none do
  std::vector<int32_t> open_;
};

}  // namespace dlm
