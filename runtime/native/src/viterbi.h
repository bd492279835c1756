// The most likely text of a constraint over some positions of a canvas (Viterbi, 1967; of diffusion models: DINGO,
// arXiv:2505.23061).
//
// A position's weight of a token is its logit less that of the row's best token, in double; where there are no logits it is 0, or
// -1 beside a best token. Of texts that are equally likely the one
// whose tokens are lowest wins, the leftmost first; sums are made from the last position on. So both loops find the same one:
// exporter/dlm_export/network/constrained.py states the same.
//
// Rows of logits are what is long. Nothing is looked up of a class that no possible text has there, nor of a group with the row's
// best token in it, which is the group's best too; and of classes of many tokens, only where none of the row's highest ones is theirs.
#pragma once

#include <cstdint>
#include <vector>

#include "automaton.h"
#include "ways.h"

namespace dlm {

class Viterbi {
 public:
  explicit Viterbi(const Automaton& automaton) : automaton_(automaton), ways_(automaton) {}

  // Fills tokens, one a place, with those of the most likely way from `state` to a state of `ends` (1 or 0 a state); False where there is no way.
  bool solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens);

  // Of each place the only class that a way from `state` to a state of `ends` has there, or -1 where there are others.
  void find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& classes);

  Ways& ways() { return ways_; }

 private:
  // Of a class or a group at a place: its best token, and what that weighs. No token where nothing of it may stand there.
  struct Best {
    double weight;
    int32_t token, place;  // place: the number of the one that this is of
  };
  // Of a state at a place: the weight of the best way on, and its first step.
  struct Step {
    double weight;
    int32_t token, next;
  };

  void weigh_highest(const Place& place);
  const Best& weigh_class(const Place& place, int32_t number);
  const Best& weigh_group(const Place& place, int32_t group);
  Step step_from(const Place& place, int32_t state);

  const Automaton& automaton_;
  Ways ways_;
  std::vector<Best> classes_, groups_;
  std::vector<double> group_weights_;  // at the place that is being weighed; NaN: not weighed there, so that groups_ has nothing of it
  int32_t place_ = 0;       // the number of the place that is being weighed
  int32_t looked_at_ = -1;  // the number of the place whose highest tokens were looked at last
  std::vector<float> highest_, ordered_;  // by run of tokens, their highest logit; and in another order
  std::vector<std::vector<Step>> steps_;  // by place and state that is met
  std::vector<double> ahead_;             // by state: the weight of the best way on from behind the place
  std::vector<uint8_t> leads_on_;         // by state: whether there is one
};

}  // namespace dlm
