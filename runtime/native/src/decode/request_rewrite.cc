// Passes that rewrite a block: they replace, delete and insert tokens (LLaDA2.2).
//
// The loop is JointThresholdInDel of SGLang. All positions of a block stay undecided until its last
// pass, because later tokens move if a pass deletes or inserts one. A mask token is either a first
// mask token, with which the block started, or an added one.
// exporter/dlm_export/network/rewriting.py is the reference.
#include <algorithm>

#include "decode/request.h"

namespace dlm {

bool Request::has_first_masks() const {
  for (int32_t i = stage().block.first; i < stage().block.last; ++i)
    if (undecided_[i] != 0 && canvas_[i] == denoiser_.mask_token_id && is_added_[i] == 0)
      return true;
  return false;
}

bool Request::must_end_rewriting() const {
  return (!has_first_masks() && settled_ + 1 >= policy_.edit_passes) ||
         step_ >= stage().block.tokens() + policy_.edit_passes;
}

bool Request::choose_rewrites(const Proposals& proposals) {
  std::vector<int32_t> masks, edits;
  std::vector<double> scores;
  int32_t added = 0;
  for (size_t row = 0; row < positions_.size(); ++row) {
    const int32_t at = positions_[row];
    if (canvas_[at] == denoiser_.mask_token_id) {
      masks.push_back(static_cast<int32_t>(row));
      scores.push_back(proposals.scores[row]);
      added += is_added_[at];
    } else if (proposals.tokens[row] != canvas_[at] &&
               proposals.scores[row] > score_of(policy_.edit_threshold)) {
      edits.push_back(static_cast<int32_t>(row));
    }
  }
  const auto first_masks = static_cast<int32_t>(masks.size()) - added;
  bool is_last = must_end_rewriting();
  order_ = masks;
  if (first_masks == 0) {
    ++settled_;
  } else if (!is_last) {
    // At least as many first mask tokens as the schedule plans, whatever is added.
    const int32_t wanted = planned(static_cast<int32_t>(positions_.size())) + added;
    order_.resize(static_cast<size_t>(choose(policy_, scores, wanted, order_)));
    for (int32_t& row : order_) row = masks[row];
    const auto is_first = [&](int32_t row) { return is_added_[positions_[row]] == 0; };
    is_last = policy_.edit_passes == 0 &&
              std::count_if(order_.begin(), order_.end(), is_first) == first_masks;
    if (is_last) order_ = masks;
  }
  order_.insert(order_.end(), edits.begin(), edits.end());
  std::sort(order_.begin(), order_.end());
  return is_last || order_.empty();
}

void Request::propose_other(const Predictions& predictions, int32_t row,
                            const std::vector<int32_t>& ruled_out, Proposals& proposals) const {
  const float* const logits = predictions.logits + static_cast<size_t>(row) * denoiser_.vocab_size;
  std::vector<int32_t> best(ruled_out.size() + 1);
  best.resize(rank_tokens(denoiser_, logits, best.size(), best.data()));
  const auto is_free = [&](int32_t token) {
    return std::find(ruled_out.begin(), ruled_out.end(), token) == ruled_out.end();
  };
  const auto found = std::find_if(best.begin(), best.end(), is_free);
  if (found == best.end()) return;  // all tokens of the vocabulary are ruled out
  const size_t likeliest = static_cast<size_t>(row) * denoiser_.top_k;
  proposals.tokens[row] = *found;
  proposals.probs[row] = prob_behind(behind_of(*found, logits, predictions.tokens[likeliest]),
                                     predictions.probs[likeliest]);
}

void Request::rewrite(const Predictions& predictions, Proposals& proposals) {
  const bool is_last = choose_rewrites(proposals);
  const std::vector<int32_t> special{denoiser_.delete_token_id, denoiser_.split_token_id};
  const auto is_special = [&](int32_t row) {
    return std::find(special.begin(), special.end(), proposals.tokens[row]) != special.end();
  };
  written_.resize(positions_.size());
  if (is_last) {
    for (const int32_t row : order_)
      if (is_special(row)) propose_other(predictions, row, special, proposals);
  } else if (!seen_.insert(block_tokens()).second) {
    // The block was the same before an earlier pass. So that the passes do not go round in circles,
    // the least certain change becomes a token that was not written there before.
    int32_t least = -1;
    for (const int32_t row : order_)
      if (proposals.tokens[row] != canvas_[positions_[row]] &&
          (least < 0 || proposals.scores[row] < proposals.scores[least]))
        least = row;
    if (least >= 0) propose_other(predictions, least, written_[least], proposals);
  }
  note_guesses(proposals);
  std::vector<int32_t> texts;
  for (const int32_t row : order_) {
    written_[row].push_back(proposals.tokens[row]);
    if (!is_special(row)) texts.push_back(row);
  }
  take(predictions, proposals, texts);
  for (const int32_t at : positions_) {
    undecided_[at] = is_last ? 0 : 1;
    if (canvas_[at] != denoiser_.mask_token_id)
      guess_[at] = is_last ? -1 : canvas_[at], score_[at] = 0;
  }
  committed_ = is_last ? static_cast<int32_t>(positions_.size()) : 0;
  if (!is_last) shift_block(proposals);
}

void Request::shift_block(const Proposals& proposals) {
  const int32_t end = stage().block.last;
  int32_t grown = 0;
  // From right to left, so that the positions that are still to come stay valid.
  for (auto row = order_.rbegin(); row != order_.rend(); ++row) {
    if (proposals.tokens[*row] == denoiser_.delete_token_id)
      splice(positions_[*row], 1, 0), --grown;
    else if (proposals.tokens[*row] == denoiser_.split_token_id)
      splice(positions_[*row], 0, 1), ++grown;
  }
  if (grown > 0) splice(end, grown, 0);
  if (grown < 0) splice(end + grown, 0, -grown);
}

}  // namespace dlm
