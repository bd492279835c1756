#include "constrained.h"

#include <algorithm>

#include "error.h"
#include "loop.h"

namespace dlm {

Constrained::Constrained(const Denoiser& denoiser, const Policy& policy, std::shared_ptr<const Automaton> automaton,
                         const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided)
    : denoiser_(denoiser), policy_(policy), automaton_(std::move(automaton)), states_{0}, viterbi_(*automaton_) {
  if (automaton_->vocab_size != denoiser.vocab_size)
    fail(DLM_UNSUPPORTED, "the constraint is of a vocabulary of %d tokens, and the denoiser has %d: compile it for this bundle",
         automaton_->vocab_size, denoiser.vocab_size);
  if (automaton_->token_class[static_cast<size_t>(denoiser.mask_token_id)] >= 0)
    fail(DLM_UNSUPPORTED, "the constraint allows the mask token: compile it for this bundle");
  if (policy.select != Select::argmax)
    fail(DLM_UNSUPPORTED, "policy: a constraint finds the most likely text, and select = \"sample\" draws: use select = \"argmax\"");
  if (denoiser.eos_token_ids.empty())
    fail(DLM_UNSUPPORTED, "a constraint needs an end token, to stand behind its text, and the denoiser has none");
  const auto first = std::find(undecided.begin(), undecided.end(), 1), last = std::find(undecided.rbegin(), undecided.rend(), 1).base();
  range_ = first == undecided.end() ? Range{0, 0} : Range{static_cast<int32_t>(first - undecided.begin()), static_cast<int32_t>(last - undecided.begin())};
  if (range_.tokens() == 0) return;
  if (automaton_->distances[0] > range_.tokens())
    fail(DLM_INVALID_ARGUMENT, "the shortest text of the constraint has %d tokens, and there is room for %d: raise max_new_tokens",
         automaton_->distances[0], range_.tokens());
  if (ends_behind(range_.first, canvas, undecided).front() == 0)
    fail(DLM_INVALID_ARGUMENT, "no text of the constraint has the given tokens in positions %d..%d: change them, or leave more masks",
         range_.first, range_.last - 1);
}

Needs Constrained::needs(const Turn& turn) const { return {!turn.is_editing && policy_.score == Score::entropy, true}; }

void Constrained::propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) {
  const auto top_k = static_cast<size_t>(denoiser_.top_k), width = static_cast<size_t>(denoiser_.vocab_size);
  const auto undecided = std::find(turn.undecided.begin() + range_.first, turn.undecided.begin() + range_.last, 1);
  const int32_t first = std::min(turn.positions.front(), static_cast<int32_t>(undecided - turn.undecided.begin()));
  const int32_t last = turn.positions.back() + 1;
  const std::vector<uint8_t> ends = ends_behind(last, turn.canvas, turn.undecided);
  fill_places(first, last, turn.canvas, turn.undecided);
  for (size_t row = 0; row < turn.positions.size(); ++row) {
    Place& place = places_[static_cast<size_t>(turn.positions[row] - first)];
    place.logits = predictions.logits + row * width;
    place.best = predictions.tokens[row * top_k];
    if (turn.is_editing && predictions.probs[row * top_k] > policy_.edit_threshold && place.best != place.token) place.other = place.best;
  }
  if (!viterbi_.solve(state_before(first, turn.canvas), places_, ends, path_))
    fail(DLM_INTERNAL, "the constraint has no text for positions %d..%d", first, last - 1);
  for (size_t row = 0; row < turn.positions.size(); ++row) {
    const Place& place = places_[static_cast<size_t>(turn.positions[row] - first)];
    const float* const probs = predictions.probs + row * top_k;
    const int32_t token = path_[static_cast<size_t>(turn.positions[row] - first)];
    const double prob = prob_of(token, place.logits, place.best, probs[0]);
    proposals.tokens[row] = token;
    proposals.probs[row] = prob;
    // A margin is to the best of the other tokens, so it may be below 0.
    proposals.scores[row] = !turn.is_editing && policy_.score == Score::margin
                                ? prob - static_cast<double>(token == place.best ? probs[1] : probs[0])
                                : score_row(policy_, turn, predictions, denoiser_.top_k, row, prob);
  }
}

void Constrained::scaffold(const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided, Range range,
                           std::vector<Certain>& certain) {
  const auto open = std::find(undecided.begin() + range_.first, undecided.begin() + range_.last, 1);
  const auto first = static_cast<int32_t>(open - undecided.begin());
  const int32_t last = std::min(range.last, range_.last);
  if (first >= last) return;
  const std::vector<uint8_t> ends = ends_behind(last, canvas, undecided);
  fill_places(first, last, canvas, undecided);
  viterbi_.find_only(state_before(first, canvas), places_, ends, only_);
  const int32_t end = denoiser_.eos_token_ids.front(), end_class = automaton_->token_class[static_cast<size_t>(end)];
  for (int32_t position = std::max(first, range.first); position < last; ++position) {
    const int32_t number = only_[static_cast<size_t>(position - first)];
    if (number < 0 || undecided[static_cast<size_t>(position)] == 0) continue;
    if (number == end_class)  // which of the end tokens makes no other text
      certain.push_back({position, end});
    else if (automaton_->class_sizes[static_cast<size_t>(number)] == 1)
      certain.push_back({position, automaton_->class_tokens[static_cast<size_t>(number)]});
  }
}

void Constrained::note(int32_t position, int32_t) {
  const auto known = static_cast<size_t>(std::max(position - range_.first, 0)) + 1;
  if (states_.size() > known) states_.resize(known);
}

// What leads there is decided.
int32_t Constrained::state_before(int32_t position, const std::vector<int32_t>& canvas) {
  while (static_cast<int32_t>(states_.size()) <= position - range_.first) {
    const auto at = static_cast<size_t>(range_.first) + states_.size() - 1;
    states_.push_back(automaton_->next(states_.back(), canvas[at]));
    if (states_.back() < 0) fail(DLM_INTERNAL, "token %d at position %zu is none of the constraint's", canvas[at], at);
  }
  return states_[static_cast<size_t>(position - range_.first)];
}

std::vector<uint8_t> Constrained::ends_behind(int32_t position, const std::vector<int32_t>& canvas,
                                              const std::vector<uint8_t>& undecided) {
  fill_places(position, range_.last, canvas, undecided);
  return viterbi_.reaching(places_, 0);
}

// What is decided may stand there alone.
void Constrained::fill_places(int32_t first, int32_t last, const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided) {
  places_.clear();
  for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i)
    places_.push_back({undecided[i] != 0 ? -1 : canvas[i], -1, nullptr, -1});
}

}  // namespace dlm
