// The candidates kernel. For each row of logits, it finds the two most likely tokens, and computes
// their probabilities and log odds, and the entropy.
#pragma once

#include "kernels/common.h"

namespace {

// The two largest logits so far. If two logits are equal, the logit of the lower id comes first.
struct Best {
  float logits[2] = {-__builtin_inff(), -__builtin_inff()};
  int32_t ids[2] = {0, 0};

  void see(float logit, int32_t id) {
    const auto is_before = [&](int i) {
      return logit > logits[i] || (logit == logits[i] && id < ids[i]);
    };
    if (is_before(0)) {
      logits[1] = logits[0], ids[1] = ids[0];
      logits[0] = logit, ids[0] = id;
    } else if (is_before(1)) {
      logits[1] = logit, ids[1] = id;
    }
  }
};

inline Best find_best(const float* logits, const float* bias, int64_t vocab_size) {
  F first = simd::set(-__builtin_inff()), second = first;
  alignas(64) int32_t numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  I ids = simd::iload(numbers), first_ids = simd::izero(), second_ids = first_ids;
  int64_t i = 0;
  for (; i + kLanes <= vocab_size; i += kLanes) {
    const F x = simd::load(logits + i) + simd::load(bias + i);
    second_ids =
        simd::select_greater(x, first, first_ids, simd::select_greater(x, second, ids, second_ids));
    second = simd::select_greater(x, first, first, simd::select_greater(x, second, x, second));
    first_ids = simd::select_greater(x, first, ids, first_ids);
    first = simd::select_greater(x, first, x, first);
    ids = simd::iadd(ids, simd::iset(kLanes));
  }
  Best best;
  float lanes[2][kLanes];
  int32_t lane_ids[2][kLanes];
  simd::store(lanes[0], first), simd::store(lanes[1], second);
  simd::istore(lane_ids[0], first_ids), simd::istore(lane_ids[1], second_ids);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int rank = 0; rank < 2; ++rank) best.see(lanes[rank][lane], lane_ids[rank][lane]);
  for (; i < vocab_size; ++i) best.see(logits[i] + bias[i], static_cast<int32_t>(i));
  return best;
}

inline float sum_lanes(F x) {
  float lanes[kLanes], sum = 0;
  simd::store(lanes, x);
  for (const float lane : lanes) sum += lane;
  return sum;
}

// The sums exclude the best token, because the best token's share of 1 would hide the others where
// its logit leads by more than 15. All exponentials are relative to the second best logit, so that
// they do not underflow there: the best token counts as 1, like the second, and is subtracted from
// a sum of at least 2.
void candidates(const dlm::Candidates& c, dlm::Parallel& parallel) {
  parallel.each(c.rows, [&](int64_t row) {
    const float* const logits = c.logits + row * c.vocab_size;
    const Best best = find_best(logits, c.bias, c.vocab_size);
    const float second = best.logits[1];
    const F largest = simd::set(best.logits[0]), base = simd::set(second),
            log2e = simd::set(kLog2e);
    F total = simd::zero(), weighed = simd::zero();
    int64_t i = 0;
    while (i + kLanes <= c.vocab_size) {
      // First add up parts of the row, and then add the sums of the parts. Adding many small
      // numbers to a large total would lose their low bits, and cause a relative error of 3e-5 for
      // 150000 tokens.
      F part = simd::zero(), part_weighed = simd::zero();
      for (const int64_t end = least(i + 64 * kLanes, c.vocab_size - kLanes + 1); i < end;
           i += kLanes) {
        const F logit = simd::load(logits + i);
        const F behind = simd::min(simd::zero(), logit + simd::load(c.bias + i) - base);
        const F weight = exp2(behind * log2e);
        part += weight;
        part_weighed = simd::fma(weight, logit - largest, part_weighed);
      }
      total += part;
      weighed += part_weighed;
    }
    float sum = sum_lanes(total), product = sum_lanes(weighed);
    for (; i < c.vocab_size; ++i) {
      const float behind = logits[i] + c.bias[i] - second;
      const float weight = behind > 0 ? 1 : __builtin_expf(behind);
      sum += weight;
      product += weight * (logits[i] - best.logits[0]);
    }
    // `scale` is the exponential of the second token divided by that of the best one, and `others`
    // is the sum over all tokens but the best one. Both are NaN if the best logit is infinite.
    const float apart = best.logits[0] - best.logits[0] + second - best.logits[0];
    const float scale = __builtin_expf(apart), rest = sum - 1, others = scale * rest;
    for (int rank = 0; rank < 2; ++rank) {
      c.tokens[2 * row + rank] = best.ids[rank];
      c.probs[2 * row + rank] = (rank == 0 ? 1 : scale) / (1 + others);
    }
    c.log_odds[2 * row] = -apart - __builtin_logf(rest);
    c.log_odds[2 * row + 1] = apart - __builtin_log1pf(scale * (rest - 1));
    c.entropy[row] = product * scale / (1 + others) - __builtin_log1pf(others);
  });
}

}  // namespace
