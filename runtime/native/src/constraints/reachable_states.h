// Finds the states that an automaton can reach at each position of a canvas, and the tokens that
// are possible at this position.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "constraints/automaton.h"

namespace dlm {

// Returns true if the denoiser rules out a token with this logit. Engines return only finite logits
// and -inf. NaN counts as ruled out too, so that later comparisons never involve NaN.
inline bool is_ruled_out(float logit) { return !(logit > -std::numeric_limits<float>::infinity()); }

// One position of a text, with the tokens that are allowed at this position, and their logits.
struct Place {
  // The allowed token. If `token` is -1, all tokens are allowed. If `other` is not -1, the token
  // `other` is allowed in addition to `token`.
  int32_t token = -1;
  int32_t other = -1;  // the second allowed token, or -1
  // The logits, [V]. Without logits (NULL), the token `best` has a higher weight than all other
  // tokens.
  const float* logits = nullptr;
  // The token with the highest logit. If several tokens have this logit, `best` is the token with
  // the lowest id. -1 means that there are no logits and no preferred token.
  int32_t best = -1;

  // Returns the number to subtract from each logit, which keeps sums small. The number is the best
  // logit, or 0 if all tokens are ruled out.
  float base() const { return is_ruled_out(logits[best]) ? 0 : logits[best]; }
};

class Ways {
 public:
  explicit Ways(const Automaton& automaton) : automaton_(automaton) {}

  // Finds the states that can be reached from `state`, before each place and after the last place.
  // If the first places are the same as in the last call, the results for these places are used
  // again.
  void meet(int32_t state, const std::vector<Place>& places);
  // Returns the states before a place, in ascending order.
  const std::vector<int32_t>& before(size_t place) const { return met_[place]; }

  // Finds the states from which a text can end. Returns a 1 for each state from which the tokens of
  // `places`, followed by at most `room` more tokens, lead to the end of a text. Returns a 0 for
  // every other state.
  std::vector<uint8_t> reaching(const std::vector<Place>& places, int32_t room);

  // look_at sets the current place. may_stand returns whether a token of the group is allowed at
  // this place.
  void look_at(const Place& place);
  bool may_stand(int32_t group);

 private:
  // Updates edges_to_ and is_open_ when the current states change from `before` to `now`. Both
  // lists of states are in ascending order.
  void move_open(const std::vector<int32_t>& before, const std::vector<int32_t>& now);
  static void list(const std::vector<uint8_t>& marks, std::vector<int32_t>& states);

  const Automaton& automaton_;
  // The states that can be reached before each place, and after the last place.
  std::vector<std::vector<int32_t>> met_;
  // The values of `token` and `other` of the places for which met_ was computed.
  std::vector<std::pair<int32_t, int32_t>> stood_;
  // For each state, padded to whole machine words. is_met_: an allowed token leads to the state.
  // is_open_: at least one token leads to the state.
  std::vector<uint8_t> is_met_, is_open_;
  // For each state: the number of edges from the current states to this state.
  std::vector<int32_t> edges_to_;
  Place place_;
  std::vector<int8_t> stands_;  // for each group: the result of may_stand; -1: not computed yet
};

}  // namespace dlm
