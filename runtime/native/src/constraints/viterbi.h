// Finds the most likely text that a constraint accepts at some positions of a canvas. The search
// uses the Viterbi algorithm (1967). DINGO (arXiv:2505.23061) applies this algorithm to diffusion
// language models.
//
// A row contains the logits of all tokens at one position. The weight of a token is its logit minus
// the highest logit of its row. If a position has no logits, the weight of a token is 0, or -1 if a
// different token is marked as the best token of the position. Texts are compared in this order:
//   1. The text with fewer ruled-out tokens (logit -inf) wins.
//   2. If the numbers of ruled-out tokens are equal, the text with the larger sum of weights wins.
//   3. If the sums are equal too, the search compares the texts at the first position where their
//      tokens differ. The text whose token has the lower id wins.
// Sums are computed in double. If the best text contains a ruled-out token, or if its sum is large,
// `solve` searches again with exact sums (decode/exact_sum.h). So differences between small logits
// count even if other logits are large. tests/constrained_reference.py implements the same search
// in exact arithmetic.
//
// Rows are long, so the search reads as few logits as possible. At each place (position of the
// text), the search skips the classes of tokens that no possible text uses at this place. If a
// group contains the row's best token, this token is the best token of the group. For large
// classes, the search first finds the tokens with the highest logits of the row. Then, for each
// class that contains none of the found tokens, the search reads the logits of the class.
#pragma once

#include <cstdint>
#include <vector>

#include "constraints/automaton.h"
#include "constraints/reachable_states.h"

namespace dlm {

class Viterbi {
 public:
  explicit Viterbi(const Automaton& automaton) : automaton_(automaton), ways_(automaton) {}

  // Finds the most likely path from `state` to an end state, and fills `tokens` with one token per
  // place. `ends` contains a 1 for each end state, and a 0 for every other state. Returns false if
  // there is no path.
  bool solve(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
             std::vector<int32_t>& tokens);

  // For each place, finds the class that all paths from `state` to an end state use at this place.
  // Writes -1 if two paths use different classes at the place.
  void find_only(int32_t state, const std::vector<Place>& places, const std::vector<uint8_t>& ends,
                 std::vector<int32_t>& classes);

  Ways& ways() { return ways_; }

 private:
  // The best token of a class at one place (position of the text). `place` is the index of this
  // place.
  struct Best {
    int32_t token, place;
  };
  // The best token of a group at a place, and its weight. `token` is -1 if the place allows no
  // token of the group.
  struct Weighed {
    int32_t group, token;
    double weight;
  };
  // The results of solve() for one place.
  struct Layer {
    std::vector<double> ahead;    // for each visited state: the weight of the best path to the end
    std::vector<Weighed> groups;  // the groups that occur on the paths of `ahead`
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
  // For each group: the weight of its best token at the current place, or infinity if this weight
  // is not computed yet.
  std::vector<double> weights_;
  std::vector<int32_t> tokens_;  // for each group: the best token at the current place
  int32_t place_ = 0;            // index of the current place
  int32_t looked_at_ = -1;  // index of the place for which weigh_highest() was called most recently
  // The number of logits that best_of_class() has read at the current place.
  size_t looked_up_ = 0;
  std::vector<float> highest_;  // for each run of neighbouring tokens: the highest logit of the run
  std::vector<Layer> layers_;   // one layer per place, and one more after the last place
  // For each state after the current place: the weight of the best path to the end.
  std::vector<double> ahead_;
  std::vector<uint8_t> leads_on_;  // for each state: 1 if an end can be reached from it
};

}  // namespace dlm
