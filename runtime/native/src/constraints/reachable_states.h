// For each position of a canvas, finds the states that an automaton can reach at this position, and
// the tokens that are possible at this position.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "constraints/automaton.h"

namespace dlm {

// Returns true if the denoiser rules out a token with this logit. Engines return only finite logits
// and -inf. A token with the logit NaN also counts as ruled out, so that later comparisons never
// involve NaN.
inline bool is_ruled_out(float logit) { return !(logit > -std::numeric_limits<float>::infinity()); }

// One position of a text, with the tokens that are allowed at this position, and their logits.
struct Place {
  // If `token` is -1, all tokens are allowed. Otherwise only `token` is allowed. If `other` is not
  // -1, `other` is allowed too.
  int32_t token = -1;
  int32_t other = -1;
  // [V]: the logits of the tokens, or NULL. Without logits, the token `best` has a higher weight
  // than all other tokens.
  const float* logits = nullptr;
  // The token with the highest logit. If several tokens have this logit, `best` is the token with
  // the lowest id. Without logits, `best` is the preferred token, or -1 if there is no preferred
  // token.
  int32_t best = -1;

  // Returns the number that callers subtract from each logit to keep sums small. This number is the
  // highest logit, or 0 if all tokens are ruled out.
  float base() const { return is_ruled_out(logits[best]) ? 0 : logits[best]; }
};

class Ways {
 public:
  explicit Ways(const Automaton& automaton) : automaton_(automaton) {}

  // Finds the states that can be reached from `state`, before each place and after the last place.
  // If the first places are the same as in the last call, reuses the results for these places.
  void meet(int32_t state, const std::vector<Place>& places);
  // Returns the states before a place, in ascending order.
  const std::vector<int32_t>& before(size_t place) const { return met_[place]; }

  // Returns a 1 for each state from which a text can reach an end, and a 0 for every other state.
  // The text consists of one token for each of `places`, and then at most `room` more tokens.
  std::vector<uint8_t> reaching(const std::vector<Place>& places, int32_t room);

  // look_at() sets the current place (position of the text). may_stand() returns true if the
  // current place allows at least one token of the group.
  void look_at(const Place& place);
  bool may_stand(int32_t group);

 private:
  // Updates edges_to_ and is_open_ for the new current states. Before this call, the current states
  // were `before`. Now they are `now`. Both lists of states are in ascending order.
  void move_open(const std::vector<int32_t>& before, const std::vector<int32_t>& now);
  static void list(const std::vector<uint8_t>& marks, std::vector<int32_t>& states);

  const Automaton& automaton_;
  // For each place: the states that can be reached before the place. The last list contains the
  // states after the last place.
  std::vector<std::vector<int32_t>> met_;
  // For each place for which met_ was computed: the values of `token` and `other`.
  std::vector<std::pair<int32_t, int32_t>> stood_;
  // Both lists have one entry for each state, and are padded to whole machine words. is_met_ is 1
  // if an allowed token leads from a current state to this state. is_open_ is 1 if any token,
  // allowed or not, leads from a current state to this state.
  std::vector<uint8_t> is_met_, is_open_;
  // For each state: the number of edges from the current states to this state.
  std::vector<int32_t> edges_to_;
  Place place_;
  // For each group: the result of may_stand(), or -1 if not computed yet.
  std::vector<int8_t> stands_;
};

}  // namespace dlm
