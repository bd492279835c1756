// Finds the most likely text that a constraint accepts at some positions of a canvas, with the
// Viterbi algorithm (1967; for diffusion language models: DINGO, arXiv:2505.23061).
//
// The weight of a token is its logit minus the best logit of its row. If a row has no logits, the
// weight is 0, or -1 if another token is marked as the best. A text with fewer ruled-out tokens
// (logit -inf) always wins. Among texts with equally many, the text with the larger sum of weights
// wins. If the sums are equal, the text with the lowest tokens wins, compared from the left. Sums
// are computed in double. If the best text has a ruled-out token or its sum is large, `solve`
// searches again with exact sums (decode/exact_sum.h). So large logits never hide small ones.
// tests/constrained_reference.py implements the same in exact arithmetic.
//
// Rows of logits are long, so the search reads as few logits as possible. It skips a class that no
// possible text uses at a place. If a group contains the row's best token, that token is the
// group's best. For large classes, the search first finds the highest tokens of the row. Then it
// reads only those classes that contain none of these tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"

namespace dlm {

class Viterbi {
 public:
  explicit Viterbi(const Automaton& automaton) : automaton_(automaton), ways_(automaton) {}

  // Finds the most likely path from `state` to one of `ends`, and fills `tokens` with one token per
  // place. `ends` has a 1 or 0 for each state. Returns false if there is no path.
  bool solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
             std::vector<int32_t>& tokens);

  // For each place, finds the class that all paths from `state` to one of `ends` use there. Writes
  // -1 if the paths use different classes.
  void find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
                 std::vector<int32_t>& classes);

  Ways& ways() { return ways_; }

 private:
  // The best token of a class at a place. The place is identified by its number.
  struct Best {
    int32_t token, place;
  };
  // A group's best token at a place, or -1 if the place allows no token of the group.
  struct Weighed {
    int32_t group, token;
    double weight;
  };
  // The results for one place.
  struct Layer {
    std::vector<double> ahead;    // by visited state: the weight of the best path to the end
    std::vector<Weighed> groups;  // the groups that these paths use
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
  std::vector<double> weights_;  // by group, at the current place; infinite: not weighed yet
  std::vector<int32_t> tokens_;  // by group: its best token at the current place
  int32_t place_ = 0;            // number of the current place
  int32_t looked_at_ = -1;       // last place whose highest tokens were searched
  size_t looked_up_ = 0;         // number of tokens of the current place read before that search
  std::vector<float> highest_;   // by run of consecutive tokens: the highest logit
  std::vector<Layer> layers_;    // by place, plus one after the last
  std::vector<double> ahead_;    // by state after the current place: the weight of the best path to
                                 // the end
  std::vector<uint8_t> leads_on_;  // by state: whether an end can be reached from it
};

}  // namespace dlm
