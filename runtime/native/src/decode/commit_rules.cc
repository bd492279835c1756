#include "decode/commit_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "decode/policy.h"

namespace dlm {
namespace {

// Returns true if a position with the given score commits independently of all other scores.
bool reaches(const Policy& policy, double score) {
  const double limit = policy.commit == Commit::entropy_threshold ? -policy.entropy_bound
                                                                  : score_of(policy.threshold);
  return policy.compare == Compare::above ? score > limit : score >= limit;
}

// Returns true if a pass commits all undecided positions of a block, which have these scores.
bool finishes(const Policy& policy, std::vector<double>::const_iterator first,
              std::vector<double>::const_iterator last) {
  return policy.finish_threshold < 1 && compares_fractions(policy.commit) &&
         *std::min_element(first, last) >= score_of(policy.finish_threshold);
}

}  // namespace

int32_t even_count(int32_t masked, int32_t step, int32_t steps) {
  return step < steps ? masked / steps + (step < masked % steps ? 1 : 0) : 1;
}

int32_t floor_count(int32_t masked, int32_t left, int32_t steps) {
  const auto kept = [&](int32_t k) {
    return static_cast<int32_t>(static_cast<float>(masked) *
                                static_cast<float>(static_cast<double>(k) / steps));
  };
  // This binary search finds the largest k below `steps` for which fewer than `left` positions stay
  // masked.
  int32_t lowest = 0, highest = steps - 1;
  while (lowest < highest) {
    const int32_t k = highest - (highest - lowest) / 2;
    if (kept(k) < left)
      lowest = k;
    else
      highest = k - 1;
  }
  return left - kept(lowest);
}

int32_t timestep_count(int32_t masked, int32_t step, int32_t steps, double eps) {
  if (step >= steps - 1) return masked;
  // Computes torch.linspace(1, eps, steps + 1) in fp32. Like torch, this code starts from the
  // nearer end of the interval for each value, and uses an increment that was rounded to fp32.
  const int32_t half = steps / 2 + steps % 2;  // half of steps + 1, which could overflow int32
  const float end = static_cast<float>(eps), increment = (end - 1.0f) / static_cast<float>(steps);
  const auto t = [&](int32_t i) {
    const double exact =
        i < half ? 1.0 + static_cast<double>(increment) * i
                 : static_cast<double>(end) - static_cast<double>(increment) * (steps - i);
    return static_cast<float>(exact);
  };
  const float share = 1.0f - t(step + 1) / t(step);
  return std::max(1, static_cast<int32_t>(static_cast<float>(masked) * share));
}

double log_odds_of(double fraction) {
  return fraction >= 1 ? std::numeric_limits<double>::infinity()
                       : std::log(fraction) - std::log1p(-fraction);
}

double score_of_log_odds(double log_odds) {
  // atanh(c) is ln((1 + c) / (1 - c)) / 2, and (1 + c) / (1 - c) is 1 + 2 c / (1 - c). Above 40,
  // the 1 does not change the sum.
  return log_odds > 40 ? (log_odds + std::log(2.0)) / 2 : std::log1p(2 * std::exp(log_odds)) / 2;
}

double score_of(double fraction) {
  return fraction < 0 ? -score_of(-fraction) : score_of_log_odds(log_odds_of(fraction));
}

double fraction_of(double score) { return std::tanh(score); }

int32_t choose(const Policy& policy, const std::vector<double>& scores, int32_t planned,
               std::vector<int32_t>& order) {
  const auto size = static_cast<int32_t>(scores.size());
  order.resize(scores.size());
  std::iota(order.begin(), order.end(), 0);
  if (policy.commit != Commit::sequential && policy.commit != Commit::verify &&
      policy.commit != Commit::longest_prefix)
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  const auto ranked = [&](int32_t rank) { return scores[order[static_cast<size_t>(rank)]]; };
  planned = std::max(1, std::min(planned, size));
  const auto above = [&] {
    int32_t count = 0;
    while (count < size && reaches(policy, ranked(count))) ++count;
    return count;
  };
  int32_t taken = 1;
  switch (policy.commit) {
    case Commit::statically:
    case Commit::timestep:
    case Commit::sequential:
    case Commit::verify:  // Request::verify() decides how many of the planned rows commit
      taken = planned;
      break;
    case Commit::threshold:
    case Commit::entropy_threshold:
    case Commit::longest_prefix:
      taken = std::max(1, above());
      break;
    case Commit::dynamic:
      taken = std::max(planned, above());
      break;
    case Commit::factor:
      while (taken < size && ranked(taken) >= score_of(1 - policy.factor / (taken + 2))) ++taken;
      break;
    case Commit::entropy_bound:
      for (double before = -ranked(0); taken < size && before <= policy.entropy_bound; ++taken)
        before -= ranked(taken);
      break;
  }
  if (finishes(policy, scores.begin(), scores.end())) taken = size;
  return std::min(taken, size);
}

void choose_ahead(const Policy& policy, const std::vector<double>& scores,
                  const std::vector<StartedBlock>& blocks, std::vector<int32_t>& chosen) {
  std::vector<int32_t> ranked;
  const int32_t taken = choose(policy, scores, 1, ranked);
  // If the policy compares with `>` and the best score is too low, only positions of the forced
  // blocks commit. The code of D2F and d3LLM's code for Dream do this, and d3LLM's code for LLaDA
  // does not.
  const bool is_low = policy.compare == Compare::above && !reaches(policy, scores[ranked[0]]);
  chosen.assign(ranked.begin(), ranked.begin() + (is_low ? 0 : taken));
  for (const auto& [first, last, is_forced] : blocks) {
    const bool is_finished = finishes(policy, scores.begin() + first, scores.begin() + last);
    const auto is_inside = [first = first, last = last](int32_t row) {
      return row >= first && row < last;
    };
    if (is_finished) {
      chosen.erase(std::remove_if(chosen.begin(), chosen.end(), is_inside), chosen.end());
      for (int32_t row = first; row < last; ++row) chosen.push_back(row);
    } else if (is_forced && std::none_of(chosen.begin(), chosen.end(), is_inside)) {
      chosen.push_back(*std::find_if(ranked.begin(), ranked.end(), is_inside));
    }
  }
}

}  // namespace dlm
