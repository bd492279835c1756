// The most likely text of a constraint over some positions of a canvas (Viterbi, 1967; of diffusion models: DINGO,
// arXiv:2505.23061).
//
// A position's weight of a token is its logit less that of the row's best token, in double. Of texts that are equally likely the one
// whose tokens are lowest wins, the leftmost first; sums are made from the last position on. So both loops find the same one:
// exporter/dlm_export/network/constrained.py states the same.
#pragma once

#include <cstdint>
#include <vector>

#include "automaton.h"

namespace dlm {

// What may stand at a position, and how its tokens are weighed.
struct Place {
  int32_t token = -1;             // alone, or beside `other`; -1: any token
  int32_t other = -1;             // -1: none
  const float* logits = nullptr;  // [V]; NULL: all tokens weigh nothing
  int32_t best = -1;              // of the logits
};

class Viterbi {
 public:
  explicit Viterbi(const Automaton& automaton) : automaton_(automaton) {}

  // Fills tokens, one a place, with those of the most likely way from `state` to a state of `ends` (1 or 0 a state); a place
  // without logits whose token is -1 gets any that leads on. False where there is no way.
  bool solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens);

  // Of each place the only class that a way from `state` to a state of `ends` has there, or -1 where there are others.
  void find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends, std::vector<int32_t>& classes);

  // The states, 1 or 0 each, from which `places` lead to a text that may end `room` tokens behind them at the latest.
  std::vector<uint8_t> reaching(const std::vector<Place>& places, int32_t room) const;

 private:
  // Of a class or a group at a position: its best token, and what that weighs. No token where nothing of it may stand there.
  struct Best {
    double weight;
    int32_t token;
  };
  // Of a state at a position: the weight of the best way on, and its first step.
  struct Step {
    int32_t state, token, next;
    double weight;
  };

  void meet(int32_t state, const std::vector<Place>& places);
  void weigh(const Place& place);
  Best weigh_group(int32_t group);

  const Automaton& automaton_;
  std::vector<Best> classes_, groups_;
  std::vector<float> highest_;                // by class + 1, of a row of logits
  std::vector<int32_t> highest_token_, fresh_;  // fresh_: of a group, the number of the weighing that groups_ is of
  int32_t weighing_ = 0;
  std::vector<std::vector<Step>> steps_;  // by position, and one behind the last: the states that can be met there, ascending
  std::vector<double> ahead_;  // by state: the weight of the best way on from the position behind
  std::vector<uint8_t> is_met_;
};

// Whether a token of the group may stand there.
bool may_stand(const Automaton& automaton, const Place& place, int32_t group);

}  // namespace dlm
