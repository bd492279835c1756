// Finds the states that an automaton can reach at each position of a canvas, and the tokens that
// are possible there.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "constraints/automaton.h"

namespace dlm {

// True if the denoiser rules a token out. Engines only return finite logits and -inf. NaN counts as
// ruled out too, so that comparisons never see NaN.
inline bool is_ruled_out(float logit) { return !(logit > -std::numeric_limits<float>::infinity()); }

// One position of a text: the tokens allowed there, and their weights.
struct Place {
  int32_t token = -1;  // the allowed token (with `other`, one of two); -1: all tokens are allowed
  int32_t other = -1;  // the second allowed token; -1: there is none
  // [V]. If NULL, all tokens weigh 0, except that `best` weighs more.
  const float* logits = nullptr;
  int32_t best = -1;  // lowest token with the highest logit; -1: no preference, without logits

  // The number subtracted from logits to keep sums small. It is the best logit, or 0 if all tokens
  // are ruled out.
  float base() const { return is_ruled_out(logits[best]) ? 0 : logits[best]; }
};

class Ways {
 public:
  explicit Ways(const Automaton& automaton) : automaton_(automaton) {}

  // Finds the states reachable from `state` before each place and after the last place. Reuses the
  // results of the last call for the leading places that did not change.
  void meet(int32_t state, const std::vector<Place>& places);
  // the states, ascending
  const std::vector<int32_t>& before(size_t place) const { return met_[place]; }

  // Returns 1 for each state from which `places`, followed by at most `room` tokens, can lead to
  // the end of a text, and 0 for all other states.
  std::vector<uint8_t> reaching(const std::vector<Place>& places, int32_t room);

  // look_at sets the current place. may_stand says whether this place allows a token of the group.
  void look_at(const Place& place);
  bool may_stand(int32_t group);

 private:
  // Updates edges_to_ and is_open_ when the current states change from `before` to `now`. Both
  // lists are ascending.
  void move_open(const std::vector<int32_t>& before, const std::vector<int32_t>& now);
  static void list(const std::vector<uint8_t>& marks, std::vector<int32_t>& states);

  const Automaton& automaton_;
  std::vector<std::vector<int32_t>> met_;           // by place, plus one after the last
  std::vector<std::pair<int32_t, int32_t>> stood_;  // `token` and `other` of the places that met_
                                                    // was computed for
  // By state, padded to whole words. is_met_: the allowed tokens lead to the state. is_open_: some
  // token leads to it.
  std::vector<uint8_t> is_met_, is_open_;
  std::vector<int32_t> edges_to_;  // by state: the number of edges to it from the current states
  Place place_;
  std::vector<int8_t> stands_;  // by group: the result of may_stand; -1: not computed yet
};

}  // namespace dlm
