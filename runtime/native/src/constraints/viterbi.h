// The most likely text of a constraint over positions of a canvas (Viterbi, 1967; DINGO,
// arXiv:2505.23061).
//
// A token weighs its logit minus the best logit of its row. Without logits it weighs 0, or -1 if
// another token is marked as the best. A text with fewer ruled-out tokens (logit -inf) always wins;
// among those, the larger sum wins. Ties go to the text with the lowest tokens, compared from the
// left. Sums are in double. If the best sum is ruled out or large, `solve` searches again with
// exact sums (decode/exact_sum.h), so large logits never hide small ones.
// tests/constrained_reference.py implements the same in exact arithmetic.
//
// Rows of logits are long, so few logits are read. A class that no possible text uses at a place is
// skipped. If a group contains the row's best token, that is the group's best. For large classes,
// the row's highest tokens are found first, and only classes without one are searched.
#pragma once

#include <cstdint>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"

namespace dlm {

class Viterbi {
 public:
  explicit Viterbi(const Automaton& automaton) : automaton_(automaton), ways_(automaton) {}

  // Fills tokens, one per place, with the most likely path from `state` to one of `ends` (1 or 0
  // per state). Returns false if no path exists.
  bool solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
             std::vector<int32_t>& tokens);

  // For each place, the only class on all paths from `state` to one of `ends`, or -1 if several.
  void find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
                 std::vector<int32_t>& classes);

  Ways& ways() { return ways_; }

 private:
  // The best token of a class at the place with this number.
  struct Best {
    int32_t token, place;
  };
  // A group's best token at a place; -1 if the place allows none of its tokens.
  struct Weighed {
    int32_t group, token;
    double weight;
  };
  // The results at a place.
  struct Layer {
    std::vector<double> ahead;    // by visited state: the weight of the best path to the end
    std::vector<Weighed> groups;  // used by these paths
  };

  void weigh_highest(const Place& place);
  int32_t best_of_class(const Place& place, int32_t number);
  int32_t best_of_group(const Place& place, int32_t group);
  void weigh_edges(const Place& place, int32_t state, Layer& layer);
  bool solve_exactly(int32_t state, const std::vector<Place>& places,
                     const std::vector<uint8_t>& ends, std::vector<int32_t>& tokens);
  int32_t find_step(size_t place, int32_t state, int32_t& token);

  const Automaton& automaton_;
  Ways ways_;
  std::vector<Best> classes_;
  std::vector<double> weights_;  // by group, at the place being weighed; infinite: not weighed yet
  std::vector<int32_t> tokens_;  // by group weighed there
  int32_t place_ = 0;            // the number of the place being weighed
  int32_t looked_at_ = -1;       // the place whose highest tokens were searched last
  size_t looked_up_ = 0;         // tokens of the place that were read before that search
  std::vector<float> highest_;   // by run of tokens: their highest logit
  std::vector<Layer> layers_;    // by place, plus one after the last
  std::vector<double> ahead_;    // by state after the place: the weight of the best path to the end
  std::vector<uint8_t> leads_on_;  // by state: whether it can reach an end
};

}  // namespace dlm
