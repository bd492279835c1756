// The most likely text of a constraint over positions of a canvas (Viterbi, 1967; DINGO,
// arXiv:2505.23061).
//
// A token weighs its logit less the best logit of its row; without logits 0, or -1 where another
// token is marked as the best. A text with fewer ruled-out tokens (logit -inf) is always better;
// among those the larger sum wins. If texts are equal, the one with the lowest tokens wins,
// compared from the left. Sums are made in double. If the best sum is ruled out or is large,
// `solve` repeats the search with exact sums (decode/exact_sum.h), so large logits never hide small
// ones. exporter/dlm_export/network/constrained.py implements the same in exact arithmetic.
//
// Rows of logits are what is long. Nothing is looked up of a class that no possible text has there,
// nor of a group with the row's best token in it, which is the group's best too; and where classes
// have many tokens, only of those that have none of the row's highest ones.
#pragma once

#include <cstdint>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"

namespace dlm {

class Viterbi {
 public:
  explicit Viterbi(const Automaton& automaton) : automaton_(automaton), ways_(automaton) {}

  // Fills tokens, one a place, by the most likely way from `state` to one of `ends` (1 or 0 a
  // state); false if there is none.
  bool solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
             std::vector<int32_t>& tokens);

  // For each place the only class that ways from `state` to one of `ends` have there, or -1.
  void find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
                 std::vector<int32_t>& classes);

  Ways& ways() { return ways_; }

 private:
  // The best token of a class, at the place with this number.
  struct Best {
    int32_t token, place;
  };
  // Of a group at a place. No token where nothing of it may stand there.
  struct Weighed {
    int32_t group, token;
    double weight;
  };
  // Of a place.
  struct Layer {
    std::vector<double> ahead;    // by state that is met, the weight of the best way on
    std::vector<Weighed> groups;  // that ways lead through
  };

  void weigh_highest(const Place& place);
  int32_t best_of_class(const Place& place, int32_t number);
  int32_t best_of_group(const Place& place,
                        int32_t group);  // -1 if none of its tokens may stand there
  void weigh_edges(const Place& place, int32_t state, Layer& layer);
  bool solve_exactly(int32_t state, const std::vector<Place>& places,
                     const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens);
  int32_t find_step(size_t place, int32_t state, int32_t& token);

  const Automaton& automaton_;
  Ways ways_;
  std::vector<Best> classes_;
  std::vector<double>
      weights_;  // by group, at the place that is being weighed; endless: not weighed there
  std::vector<int32_t> tokens_;  // by group that is weighed there
  int32_t place_ = 0;            // the number of the place that is being weighed
  int32_t looked_at_ = -1;       // the number of the place whose highest tokens were looked at last
  size_t looked_up_ = 0;         // tokens of the place before that
  std::vector<float> highest_;   // by run of tokens, their highest logit
  std::vector<Layer> layers_;    // by place, and one behind the last
  std::vector<double> ahead_;    // by state: the weight of the best way on from behind the place
  std::vector<uint8_t> leads_on_;  // by state: whether there is one
};

}  // namespace dlm
