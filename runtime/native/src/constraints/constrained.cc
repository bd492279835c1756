#include "constraints/constrained.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"

namespace dlm {
namespace {

[[noreturn]] void refuse_without_text(int32_t position) {
  fail(DLM_INTERNAL, "the constraint accepts no text at position %d", position);
}

}  // namespace

Constrained::Constrained(const Denoiser& denoiser, const Policy& policy,
                         std::shared_ptr<const Automaton> automaton, int32_t given,
                         const std::vector<int32_t>& canvas, const std::vector<uint8_t>& undecided)
    : denoiser_(denoiser),
      policy_(policy),
      automaton_(std::move(automaton)),
      states_{0},
      viterbi_(*automaton_),
      texts_(*automaton_, denoiser.mask_token_id) {
  if (automaton_->vocab_size != denoiser.vocab_size)
    fail(DLM_UNSUPPORTED,
         "the constraint has a vocabulary of %d tokens, but the denoiser has %d: compile it for "
         "this bundle",
         automaton_->vocab_size, denoiser.vocab_size);
  if (denoiser.has_mask_token() && automaton_->token_class[denoiser.mask_token_id] >= 0)
    fail(DLM_UNSUPPORTED, "the constraint allows the mask token: compile it for this bundle");
  const auto first = std::find(undecided.begin(), undecided.end(), 1),
             last = std::find(undecided.rbegin(), undecided.rend(), 1).base();
  range_ = first == undecided.end() ? Range{0, 0}
                                    : Range{static_cast<int32_t>(first - undecided.begin()),
                                            static_cast<int32_t>(last - undecided.begin())};
  const int32_t shortest = automaton_->distances[0];
  const auto require_room = [&] {
    if (shortest > range_.tokens())
      fail(DLM_INVALID_ARGUMENT,
           "the shortest text of the constraint has %d tokens, but there is room for %d: raise "
           "max_new_tokens",
           shortest, range_.tokens());
  };
  if (range_.tokens() == 0) {
    require_room();
    return;
  }
  if (given > range_.first)
    fail(DLM_INVALID_ARGUMENT,
         "%d given tokens should start the constraint's text, but there are only %d before the "
         "first undecided position",
         given, range_.first);
  range_.first -= given;
  if (automaton_->is_padded) require_room();
  const bool has_text = ends_behind(range_.first, canvas, undecided).front() != 0;
  if (!has_text && !automaton_->is_padded)
    fail(
        DLM_INVALID_ARGUMENT,
        "no text of the constraint has exactly %d tokens and contains the given tokens of "
        "positions %d..%d. This denoiser has no end token, so the text must fill all masks: change "
        "the number of masks or the given tokens",
        range_.tokens(), range_.first, range_.last - 1);
  if (!has_text)
    fail(DLM_INVALID_ARGUMENT,
         "no text of the constraint matches the given tokens in positions %d..%d: change them, or "
         "leave more masks",
         range_.first, range_.last - 1);
  if (automaton_->options() > 0)
    options_ = std::make_unique<OptionProbs>(*automaton_, range_.tokens());
}

Needs Constrained::needs(const Turn&) const {
  return {policy_.score == Score::entropy && !scores_texts(), true};
}

bool Constrained::scores_texts() const {
  if (policy_.score == Score::random) return false;
  return policy_.score_of == ScoreOf::marginal ||
         (policy_.select == Select::sample && policy_.score_of == ScoreOf::draw);
}

double Constrained::score_of_texts(const Marginal& found) const {
  return policy_.score == Score::entropy
             ? found.entropy
             : score_of(policy_.score == Score::margin ? found.margin : found.prob);
}

// Fills places_ for the positions of a turn and those between them. Returns the first position.
int32_t Constrained::look_at(const Turn& turn, const Predictions& predictions) {
  const int32_t first = std::min(turn.positions.front(), first_open(turn.undecided));
  fill_places(first, turn.positions.back() + 1, turn.canvas, turn.undecided);
  for (size_t row = 0; row < turn.positions.size(); ++row) {
    Place& place = places_[turn.positions[row] - first];
    place.logits = predictions.logits + row * denoiser_.vocab_size;
    place.best = predictions.tokens[row * denoiser_.top_k];
  }
  return first;
}

void Constrained::propose(const Turn& turn, const Predictions& predictions, Proposals& proposals) {
  const size_t top_k = denoiser_.top_k;
  const int32_t last = turn.positions.back() + 1;
  const std::vector<uint8_t> ends = ends_behind(last, turn.canvas, turn.undecided);
  const int32_t first = look_at(turn, predictions);
  if (options_ != nullptr && turn.block.first > answered_block_) {
    answered_block_ = turn.block.first;
    const int32_t state = state_before(first, turn.canvas);
    texts_.sum(state, places_, ends, {1, 1, 0});
    options_->add_block(state, range_.last - first, texts_, std::max(range_.last - last, 0));
  }
  for (size_t row = 0; row < turn.positions.size(); ++row) {
    Place& place = places_[turn.positions[row] - first];
    if (turn.is_edit(row) &&
        predictions.log_odds_at(row * top_k) > log_odds_of(policy_.edit_threshold) &&
        place.best != place.token)
      place.other = place.best;
  }
  if (turn.is_causal)
    find_causal_text(turn, first);
  else
    find_text(turn, state_before(first, turn.canvas), ends);
  for (size_t row = 0; row < turn.positions.size(); ++row) {
    const int32_t at = turn.positions[row] - first;
    const Place& place = places_[at];
    const float best_prob = predictions.probs[row * top_k];
    const double behind = behind_of(path_[at], place.logits, place.best);
    const double prob = prob_behind(behind, best_prob);
    proposals.tokens[row] = path_[at];
    proposals.probs[row] = prob;
    // The margin of a row is the probability of the proposed token minus the highest probability of
    // any other token. So the margin can be negative.
    if (scores_texts() && !turn.is_edit(row) && !turn.is_causal)
      proposals.scores[row] = score_of_texts(marginals_[at]);
    else if (!turn.is_edit(row) && policy_.score == Score::margin && path_[at] != place.best)
      proposals.scores[row] = score_of(prob - static_cast<double>(best_prob));
    else
      proposals.scores[row] =
          score_row(policy_, turn, predictions, denoiser_.top_k, row,
                    log_odds_behind(behind, predictions.log_odds_at(row * top_k)));
  }
}

// Finds a text that the constraint accepts, and writes this text to path_. If scores_texts() is
// true, also fills marginals_. The most likely text decides which tokens are replaced. All of these
// edits commit, so random draws and marginals treat their tokens as decided.
void Constrained::find_text(const Turn& turn, int32_t state, const std::vector<uint8_t>& ends) {
  const Sampling predicted{1, 1, 0};
  const bool is_drawn = policy_.select == Select::sample;
  const bool has_edits = std::any_of(places_.begin(), places_.end(),
                                     [](const Place& place) { return place.other >= 0; });
  bool is_found = true;
  if (!is_drawn || has_edits) is_found = viterbi_.solve(state, places_, ends, path_);
  if (is_found && has_edits)
    for (Place& place : places_)
      if (place.other >= 0) place.token = path_[&place - places_.data()], place.other = -1;
  if (is_found && is_drawn) {
    is_found = texts_.sum(state, places_, ends, drawn_at(turn));
    const int32_t first = turn.positions.back() + 1 - static_cast<int32_t>(places_.size());
    if (is_found)
      texts_.draw({policy_.seed, static_cast<uint32_t>(turn.passes), static_cast<uint32_t>(first)},
                  path_);
  }
  if (!is_found) refuse_without_text(turn.positions.back());
  if (!scores_texts()) return;
  if (policy_.score_of == ScoreOf::marginal) texts_.sum(state, places_, ends, predicted);
  texts_.find_marginals(path_, policy_.score != Score::confidence, marginals_);
}

// Chooses or draws a legal token for each position from left to right, like a denoiser that
// predicts one token at a time. A token is legal if the rest of the canvas has room for the rest of
// the text.
void Constrained::find_causal_text(const Turn& turn, int32_t first) {
  const std::vector<Place> all = places_;
  int32_t state = state_before(first, turn.canvas);
  std::vector<int32_t> token;
  path_.clear();
  for (const Place& place : all) {
    const auto position = first + static_cast<int32_t>(path_.size());
    const std::vector<uint8_t> ends = ends_behind(position + 1, turn.canvas, turn.undecided);
    const bool is_drawn = policy_.select == Select::sample;
    if (!(is_drawn ? texts_.sum(state, {place}, ends, drawn_at(turn))
                   : viterbi_.solve(state, {place}, ends, token)))
      refuse_without_text(position);
    if (is_drawn)
      texts_.draw(
          {policy_.seed, static_cast<uint32_t>(turn.passes), static_cast<uint32_t>(position)},
          token);
    state = automaton_->next(state, token.front());
    path_.push_back(token.front());
  }
  places_ = all;
}

void Constrained::find_best(const Turn& turn, const Predictions& predictions,
                            std::vector<int32_t>& tokens) {
  const int32_t last = turn.positions.back() + 1;
  const std::vector<uint8_t> ends = ends_behind(last, turn.canvas, turn.undecided);
  const int32_t first = look_at(turn, predictions);
  if (!viterbi_.solve(state_before(first, turn.canvas), places_, ends, path_))
    refuse_without_text(last - 1);
  for (size_t row = 0; row < turn.positions.size(); ++row)
    tokens[row] = path_[turn.positions[row] - first];
}

void Constrained::scaffold(const std::vector<int32_t>& canvas,
                           const std::vector<uint8_t>& undecided, Range range,
                           std::vector<Certain>& certain) {
  const int32_t first = first_open(undecided), last = std::min(range.last, range_.last);
  if (first >= last) return;
  const std::vector<uint8_t> ends = ends_behind(last, canvas, undecided);
  fill_places(first, last, canvas, undecided);
  viterbi_.find_only(state_before(first, canvas), places_, ends, only_);
  const int32_t end = denoiser_.eos_token_ids.empty() ? -1 : denoiser_.eos_token_ids.front(),
                end_class = end < 0 ? -1 : automaton_->token_class[end];
  for (int32_t position = std::max(first, range.first); position < last; ++position) {
    const int32_t number = only_[position - first];
    if (number < 0 || undecided[position] == 0) continue;
    // Only end tokens are legal at this position, and all end tokens produce the same text.
    if (number == end_class)
      certain.push_back({position, end});
    else if (const View<int32_t> tokens = automaton_->tokens_of(number); tokens.size == 1)
      certain.push_back({position, tokens[0]});
  }
}

void Constrained::complete(const std::vector<int32_t>& canvas,
                           const std::vector<uint8_t>& undecided, std::vector<int32_t>& guess) {
  const int32_t first = first_open(undecided);
  if (first == range_.last) return;
  fill_places(first, range_.last, canvas, undecided);
  for (Place& place : places_) {
    if (place.token >= 0) continue;
    place.token = guess[first + (&place - places_.data())];
    if (place.token < 0 && !denoiser_.eos_token_ids.empty())
      place.best = denoiser_.eos_token_ids.front();
  }
  const std::vector<uint8_t> ends = viterbi_.ways().reaching({}, 0);
  if (!viterbi_.solve(state_before(first, canvas), places_, ends, path_))
    refuse_without_text(range_.last - 1);
  std::copy(path_.begin(), path_.end(), guess.begin() + first);
}

int32_t Constrained::first_open(const std::vector<uint8_t>& undecided) const {
  const auto last =
      undecided.begin() + std::min(range_.last, static_cast<int32_t>(undecided.size()));
  return static_cast<int32_t>(std::find(undecided.begin() + range_.first, last, 1) -
                              undecided.begin());
}

void Constrained::note(int32_t position, int32_t) {
  const auto known = static_cast<size_t>(std::max(position - range_.first, 0)) + 1;
  if (states_.size() > known) states_.resize(known);
}

// Returns the automaton's state before `position`. All positions of range_ that are before
// `position` must be decided.
int32_t Constrained::state_before(int32_t position, const std::vector<int32_t>& canvas) {
  while (static_cast<int32_t>(states_.size()) <= position - range_.first) {
    const int32_t at = range_.first + static_cast<int32_t>(states_.size()) - 1;
    states_.push_back(automaton_->next(states_.back(), canvas[at]));
    if (states_.back() < 0) refuse_without_text(at);
  }
  return states_[position - range_.first];
}

std::vector<uint8_t> Constrained::ends_behind(int32_t position, const std::vector<int32_t>& canvas,
                                              const std::vector<uint8_t>& undecided) {
  fill_places(position, range_.last, canvas, undecided);
  return viterbi_.ways().reaching(places_, 0);
}

// Fills places_ for the positions from `first` to `last` - 1. At a decided position, only the
// decided token is allowed. Positions after the end of the canvas are undecided.
void Constrained::fill_places(int32_t first, int32_t last, const std::vector<int32_t>& canvas,
                              const std::vector<uint8_t>& undecided) {
  places_.clear();
  const auto length = static_cast<int32_t>(undecided.size());
  for (int32_t i = first; i < last; ++i)
    places_.push_back({i >= length || undecided[i] != 0 ? -1 : canvas[i], -1, nullptr, -1});
}

}  // namespace dlm
