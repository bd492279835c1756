// Computes the probability of each option of a decision (compile/tokens/decisions.h). A decision
// consists of questions, and each question has several options.
//
// In a block, the probability of an option is the total probability of the texts that complete this
// option. Some texts reach the end of the block before they complete an option of a question. The
// probability of such a text is divided equally among the options that can still follow. When the
// next block starts, the tokens of this block are committed, and rule out some of the options. The
// probabilities of the remaining options keep their sum, and the texts of the next block decide how
// this sum is divided among the options.
#pragma once

#include <cstdint>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/marginals.h"

namespace dlm {

class OptionProbs {
 public:
  // The automaton must be compiled from a decision, and must outlive this object. `room` is the
  // largest number of tokens that the answer and the text after the answer may have together.
  OptionProbs(const Automaton& automaton, int32_t room);

  // Adds the texts of a block. These texts start in `state`, and `texts` contains their sums.
  // `room` is the number of positions from the start of the block to the end of the constrained
  // range. `room_behind` is the number of positions in this range after the block.
  void add_block(int32_t state, int32_t room, Texts& texts, int32_t room_behind);

  // Returns one probability for each option, in the order of the options.
  const std::vector<double>& probs() const { return probs_; }

 private:
  // Finds the options that a text in `state` can still complete, so that the rest of the answer
  // fits into `room` tokens. Sets follows_ to 1 for these options, and to 0 for all others.
  void find_following(int32_t state, int32_t room);
  // Returns the number of options of a question for which follows_ is 1.
  double count_following(size_t question) const;

  const Automaton& automaton_;
  std::vector<double> probs_, found_, visits_, last_;
  std::vector<uint8_t> follows_;  // for each option: 0 or 1, set by find_following()
  // For each state: the smallest number of tokens from the `state` of find_following() to this
  // state. The number is -1 if no such path leaves room for the rest of the answer.
  std::vector<int32_t> steps_;
  std::vector<int32_t> open_;
};

}  // namespace dlm
