// A kernel for CUDA devices that draws a token from each row of logits, like Sampler::draw on the
// host (decode/sampling.h). If a row is guided, the kernel first computes the guided logits,
// candidates and entropy, like Guided::guide (decode/guidance.h). So the logits need not be copied
// to the host.
//
// This file is embedded into the library as text, and NVRTC compiles it for the device. It is also
// an ordinary C++ header, so tests run the kernel on the host. One block of threads computes one
// row. The code consists of phases: in a phase, each thread of the block runs the same function,
// and all threads wait for each other before the next phase. On the host, a phase is a loop over
// the threads. Only `Block` keeps values from phase to phase.
//
// Each comparison and the random numbers are those of the host. Sums are added in another, fixed
// order, and the device's exp and log may differ from the host's in the last bit. So draws differ
// from the host's only if two tokens, or a sum and top_p, are equal up to this rounding.
#pragma once

#include <math.h>
#include <string.h>

#include <cstdint>

#include "base/gumbel.h"
#include "base/random.h"
#include "engines/draws.h"

namespace dlm::draw_kernel {

constexpr int32_t kThreads = 512;

// All arrays are in device memory. R is the number of rows, V the size of the vocabulary, and K the
// number of candidates.
struct Arguments {
  float* logits;            // [R, V]; the kernel sets those of unused tokens to -inf
  const DrawRow* rows;      // [R]
  const int32_t* unused;    // [unused_count, 2], ranges of ids that are no tokens
  Drawn* drawn;             // [R]; written for rows with a temperature
  int32_t* tokens;          // [R, K], candidates; written for guided rows, like the arrays below
  float *probs, *log_odds;  // [R, K]
  float* entropy;           // [R]
  int32_t unused_count, vocab_size, left_out, top_k;
};

// The partial results of one thread.
struct Part {
  double sum, product, largest;
  uint64_t rank, other;
  int32_t token, is_bad;
};

struct Block {
  Part parts[kThreads];
  // The rank of the best token, of the last token that is not cut, and of the last candidate.
  uint64_t best, cut, candidate;
  // The bisection of find_cut: tokens of rank `low` and above reach the limit, those of rank `high`
  // and above do not. `before` is the sum of the latter.
  uint64_t low, high;
  double before, total;
  Drawn drawn;
  int32_t is_finite;
};

#ifdef __CUDACC__
template <class Body>
void phase(Body body) {
  body(static_cast<int32_t>(threadIdx.x));
  __syncthreads();
}
#else
template <class Body>
void phase(Body body) {
  for (int32_t thread = 0; thread < kThreads; ++thread) body(thread);
}
#endif

// Ranks order the tokens of a row: a higher rank means a larger logit, or the same logit and a
// lower id. No rank is 0. NaN has no useful rank.
inline uint64_t rank_of(float logit, int32_t token) {
  const float number = logit + 0.0f;  // converts -0 to 0
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  bits = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(~token);
}
inline int32_t token_of(uint64_t rank) { return ~static_cast<int32_t>(rank); }

class Row {
 public:
  Row(Block& block, const Arguments& arguments, int32_t row)
      : block_(block),
        arguments_(arguments),
        wanted_(arguments.rows[row]),
        row_(row),
        logits_(row_logits(row)),
        unconditional_(row_logits(wanted_.is_guided ? wanted_.unconditional : row)) {}

  void run() {
    const bool is_drawn = wanted_.sampling.temperature > 0;
    if (!is_drawn && !wanted_.is_guided) return;
    rule_out_unused();
    find_best();
    if (wanted_.is_guided) find_candidates();
    if (is_drawn) draw();
  }

 private:
  float* row_logits(int32_t row) const {
    return arguments_.logits + static_cast<int64_t>(row) * arguments_.vocab_size;
  }

  float logit(int32_t token) const {
    return wanted_.is_guided ? guided_logit(logits_[token], unconditional_[token], wanted_.guidance)
                             : logits_[token];
  }
  float best_logit() const { return logit(token_of(block_.best)); }
  double behind(int32_t token) const {
    return static_cast<double>(logit(token)) - static_cast<double>(best_logit());
  }

  // Calls visit(token, logit) for the tokens of a thread, but not for the mask token.
  template <class Visit>
  void each(int32_t thread, Visit visit) const {
    for (int32_t token = thread; token < arguments_.vocab_size; token += kThreads)
      if (token != arguments_.left_out) visit(token, logit(token));
  }

  // Calls visit(token, logit, log weight) for the tokens of a thread that can be drawn, except for
  // those that are already cut.
  template <class Visit>
  void each_weight(int32_t thread, Visit visit) const {
    const double best = static_cast<double>(best_logit());
    each(thread, [&](int32_t token, float one) {
      const double log_weight = (static_cast<double>(one) - best) / wanted_.sampling.temperature;
      if (log_weight >= -kFarthest && rank_of(one, token) >= block_.cut)
        visit(token, one, log_weight);
    });
  }

  // Joins the parts of all threads in a fixed order. Then calls finish(part) in one thread.
  template <class Join, class Finish>
  void reduce(Join join, Finish finish) {
    for (int32_t half = kThreads / 2; half > 0; half /= 2)
      phase([&](int32_t thread) {
        if (thread < half) join(block_.parts[thread], block_.parts[thread + half]);
      });
    phase([&](int32_t thread) {
      if (thread == 0) finish(block_.parts[0]);
    });
  }

  void rule_out_unused() {
    phase([&](int32_t thread) {
      for (int32_t i = 0; i < arguments_.unused_count; ++i) {
        const int32_t last = arguments_.unused[2 * i + 1];
        for (int32_t token = arguments_.unused[2 * i] + thread; token < last; token += kThreads)
          logits_[token] = -HUGE_VALF;
      }
    });
  }

  void find_best() {
    phase([&](int32_t thread) {
      Part part{};
      each(thread, [&](int32_t token, float one) {
        const uint64_t rank = rank_of(one, token);
        part.rank = rank > part.rank ? rank : part.rank;
        part.is_bad |= one < HUGE_VALF ? 0 : 1;
      });
      block_.parts[thread] = part;
    });
    reduce(
        [](Part& part, const Part& other) {
          part.rank = other.rank > part.rank ? other.rank : part.rank;
          part.is_bad |= other.is_bad;
        },
        [&](const Part& part) {
          const uint64_t lowest = rank_of(-HUGE_VALF, 0);
          block_.is_finite = part.is_bad == 0 && part.rank > lowest ? 1 : 0;
          block_.best =
              block_.is_finite != 0 ? part.rank : rank_of(0, arguments_.left_out == 0 ? 1 : 0);
          block_.cut = 0;
        });
  }

  // ---- Draws ----

  void draw() {
    if (block_.is_finite == 0) {
      phase([&](int32_t thread) {
        const double none = nan("");
        if (thread == 0) arguments_.drawn[row_] = {{token_of(block_.best), none, none, none}, none};
      });
      return;
    }
    const auto& [temperature, top_p, top_k] = wanted_.sampling;
    if (top_k > 0 || top_p < 1) cut(top_p, top_k);
    find_winner();
    if (wanted_.told != Told::token) describe();
    phase([&](int32_t thread) {
      if (thread == 0) arguments_.drawn[row_] = block_.drawn;
    });
  }

  void cut(double top_p, int32_t top_k) {
    phase([&](int32_t thread) {
      double sum = 0;
      each_weight(thread, [&](int32_t, float, double log_weight) { sum += exp(log_weight); });
      block_.parts[thread].sum = sum;
    });
    reduce([](Part& part, const Part& other) { part.sum += other.sum; },
           [&](const Part& part) { block_.total = part.sum; });
    if (top_k > 0)
      find_cut([](double) { return 1.0; }, [=](double count) { return count >= top_k; });
    const double limit = top_p * block_.total;
    if (top_p < 1)
      find_cut([](double log_weight) { return exp(log_weight); },
               [=](double sum) { return sum > limit; });
  }

  // Finds the smallest number of most likely tokens whose amounts reach a limit, and cuts all other
  // tokens. If all tokens together do not reach it, cuts no token. Uses bisection over ranks.
  template <class Amount, class Reaches>
  void find_cut(Amount amount, Reaches reaches) {
    phase([&](int32_t thread) {
      if (thread == 0) block_.low = block_.cut, block_.high = block_.best + 1, block_.before = 0;
    });
    while (block_.high - block_.low > 1) {
      phase([&](int32_t thread) {
        const uint64_t low = block_.low, high = block_.high, middle = low + (high - low) / 2;
        // rank: the lowest rank from the middle on; other: the highest rank before the middle.
        Part part{};
        part.rank = high, part.other = low;
        each_weight(thread, [&](int32_t token, float one, double log_weight) {
          const uint64_t rank = rank_of(one, token);
          if (rank < low || rank >= high) return;
          if (rank < middle) {
            part.other = rank > part.other ? rank : part.other;
          } else {
            part.rank = rank < part.rank ? rank : part.rank;
            part.sum += amount(log_weight);
          }
        });
        block_.parts[thread] = part;
      });
      reduce(
          [](Part& part, const Part& other) {
            part.sum += other.sum;
            part.rank = other.rank < part.rank ? other.rank : part.rank;
            part.other = other.other > part.other ? other.other : part.other;
          },
          [&](const Part& part) {
            const double sum = block_.before + part.sum;
            if (reaches(sum))
              block_.low = part.rank;
            else
              block_.before = sum, block_.high = part.other + 1;
          });
    }
    phase([&](int32_t thread) {
      if (thread == 0) block_.cut = block_.low;
    });
  }

  // Finds the token with the largest sum of log weight and random noise.
  void find_winner() {
    phase([&](int32_t thread) {
      Part part{};
      part.largest = -HUGE_VAL;
      float scale = HUGE_VALF;
      const double best = static_cast<double>(best_logit());
      // A pair of tokens shares one block of random words.
      for (int32_t pair = thread; 2 * pair < arguments_.vocab_size; pair += kThreads) {
        const Words words =
            philox(wanted_.key.seed,
                   {{wanted_.key.step, wanted_.key.position, static_cast<uint32_t>(pair), kDraws}});
        for (int32_t i = 0; i < 2; ++i) {
          const int32_t token = 2 * pair + i;
          if (token >= arguments_.vocab_size || token == arguments_.left_out) continue;
          const float one = logit(token);
          const double log_weight =
              (static_cast<double>(one) - best) / wanted_.sampling.temperature;
          if (!(log_weight >= -kFarthest) || rank_of(one, token) < block_.cut) continue;
          // This test rejects almost all tokens without computing a logarithm, see Winner::see.
          const float bound = exp_bound(static_cast<float>(log_weight * kLog2E));
          if (spare_of(words[2 * i]) > bound * scale) continue;
          const double value = log_weight - log(-log(unit(words[2 * i], words[2 * i + 1])));
          if (!(value > part.largest)) continue;  // a thread sees its tokens in ascending order
          part.largest = value;
          part.token = token;
          scale = static_cast<float>(fmin(exp(-value) * 1.0001, 1e30));
        }
      }
      block_.parts[thread] = part;
    });
    reduce(
        [](Part& part, const Part& other) {
          if (other.largest > part.largest ||
              (other.largest == part.largest && other.token < part.token))
            part = other;
        },
        [&](const Part& part) { block_.drawn = {{part.token, 0, 0, 0}, behind(part.token)}; });
  }

  // Computes the properties of the distribution.
  void describe() {
    phase([&](int32_t thread) {
      Part part{};
      each_weight(thread, [&](int32_t token, float, double log_weight) {
        if (token == token_of(block_.best)) return;
        const double weight = exp(log_weight);
        part.sum += weight;
        part.largest = fmax(part.largest, weight);
        part.product += weight * log_weight;
      });
      block_.parts[thread] = part;
    });
    reduce(
        [](Part& part, const Part& other) {
          part.sum += other.sum;
          part.largest = fmax(part.largest, other.largest);
          part.product += other.product;
        },
        [&](const Part& part) {
          Draw& draw = block_.drawn.draw;
          const double sum = 1 + part.sum;
          draw.prob = exp(block_.drawn.behind / wanted_.sampling.temperature) / sum;
          draw.margin = (1 - part.largest) / sum;
          draw.entropy = part.product / sum - log(sum);
        });
  }

  // ---- Guidance ----

  // Finds the most likely tokens of the guided logits, their probabilities, and the entropy.
  void find_candidates() {
    const int64_t first = static_cast<int64_t>(row_) * arguments_.top_k;
    const double none = nan("");
    phase([&](int32_t thread) {
      if (thread == 0) block_.candidate = ~static_cast<uint64_t>(0);
      for (int32_t i = thread; i < arguments_.top_k; i += kThreads) {
        const bool is_finite = block_.is_finite != 0;
        arguments_.tokens[first + i] = is_finite ? 0 : token_of(block_.best);
        arguments_.probs[first + i] = is_finite ? 0 : static_cast<float>(none);
        arguments_.log_odds[first + i] = static_cast<float>(none);
      }
    });
    if (block_.is_finite == 0) return;
    phase([&](int32_t thread) {
      Part part{};
      const double best = static_cast<double>(best_logit());
      each(thread, [&](int32_t token, float one) {
        const double log_weight = static_cast<double>(one) - best, weight = exp(log_weight);
        if (weight == 0 || token == token_of(block_.best)) return;
        part.sum += weight;
        part.product += weight * log_weight;
      });
      block_.parts[thread] = part;
    });
    reduce(
        [](Part& part, const Part& other) {
          part.sum += other.sum;
          part.product += other.product;
        },
        [&](const Part& part) {
          block_.total = part.sum;
          arguments_.entropy[row_] =
              static_cast<float>(part.product / (1 + part.sum) - log1p(part.sum));
        });
    for (int32_t i = 0; i < arguments_.top_k; ++i) find_candidate(first + i);
  }

  // Finds the most likely token after the last candidate, and writes it to the index `at`.
  void find_candidate(int64_t at) {
    phase([&](int32_t thread) {
      uint64_t most = 0;
      each(thread, [&](int32_t token, float one) {
        const uint64_t rank = rank_of(one, token);
        if (rank < block_.candidate && rank > most) most = rank;
      });
      block_.parts[thread].rank = most;
    });
    reduce([](Part& part,
              const Part& other) { part.rank = other.rank > part.rank ? other.rank : part.rank; },
           [&](const Part& part) {
             block_.candidate = part.rank;
             if (part.rank == 0) return;  // the vocabulary is smaller than the number of candidates
             const int32_t token = token_of(part.rank);
             arguments_.tokens[at] = token;
             arguments_.probs[at] = static_cast<float>(exp(behind(token)) / (1 + block_.total));
             arguments_.log_odds[at] =
                 static_cast<float>(log_odds_behind(behind(token), -log(block_.total)));
           });
  }

  Block& block_;
  const Arguments& arguments_;
  const DrawRow wanted_;
  const int32_t row_;
  float *const logits_, *const unconditional_;
};

}  // namespace dlm::draw_kernel

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(dlm::draw_kernel::kThreads)
    dlm_draw(const dlm::draw_kernel::Arguments arguments) {
  __shared__ dlm::draw_kernel::Block block;
  dlm::draw_kernel::Row(block, arguments, static_cast<int32_t>(blockIdx.x)).run();
}
#endif
