#include "constraints/option_probs.h"

#include <algorithm>

namespace dlm {

OptionProbs::OptionProbs(const Automaton& automaton, int32_t room)
    : automaton_(automaton), probs_(static_cast<size_t>(automaton.options()), 0) {
  const std::vector<int32_t>& starts = automaton.question_starts;
  find_following(0, room);
  for (size_t q = 0; q + 1 < starts.size(); ++q)
    for (int32_t option = starts[q]; option < starts[q + 1]; ++option)
      if (follows_[option] != 0) probs_[option] = 1 / count_following(q);
}

void OptionProbs::find_following(int32_t state, int32_t room) {
  follows_.assign(probs_.size(), 0);
  steps_.assign(automaton_.states, -1);
  open_.assign(1, state);
  for (size_t i = 0; i < open_.size(); ++i) {
    const int32_t from = open_[i], steps = i == 0 ? 0 : steps_[from];
    for (const auto [to, group] : automaton_.edges(from)) {
      if (steps_[to] >= 0 || steps + 1 + automaton_.distances[to] > room) continue;
      steps_[to] = steps + 1;
      open_.push_back(to);
      for (const int32_t option : automaton_.tags_of(to)) follows_[option] = 1;
    }
  }
}

double OptionProbs::count_following(size_t question) const {
  const std::vector<int32_t>& starts = automaton_.question_starts;
  return static_cast<double>(
      std::count(follows_.begin() + starts[question], follows_.begin() + starts[question + 1], 1));
}

void OptionProbs::add_block(int32_t state, int32_t room, Texts& texts, int32_t room_behind) {
  const std::vector<int32_t>& starts = automaton_.question_starts;
  texts.find_visits(visits_, last_);
  found_.assign(probs_.size(), 0);
  for (int32_t at = 0; at < automaton_.states; ++at) {
    if (visits_[at] > 0)
      for (const int32_t option : automaton_.tags_of(at)) found_[option] += visits_[at];
    if (!(last_[at] > 0)) continue;
    find_following(at, room_behind);
    for (size_t q = 0; q + 1 < starts.size(); ++q)
      for (int32_t option = starts[q]; option < starts[q + 1]; ++option)
        if (follows_[option] != 0) found_[option] += last_[at] / count_following(q);
  }
  find_following(state, room);
  for (size_t q = 0; q + 1 < starts.size(); ++q) {
    double open = 0;
    for (int32_t option = starts[q]; option < starts[q + 1]; ++option)
      if (follows_[option] != 0) open += probs_[option];
    for (int32_t option = starts[q]; option < starts[q + 1]; ++option)
      if (follows_[option] != 0) probs_[option] = open * found_[option];
  }
}

}  // namespace dlm
