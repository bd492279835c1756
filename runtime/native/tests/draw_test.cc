// Tests of the kernel that draws tokens on CUDA devices. The kernel runs on the host here. Compares
// its draws with those of Sampler, and its guided candidates with those of Guided.
//
//   native_tests draw_test [ROUNDS]
//   native_tests draw_test compile SM...   compiles the kernel with NVRTC for compute capabilities
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "decode/guidance.h"
#include "decode/pass.h"
#include "decode/sampling.h"
#include "engines/cuda/draw_kernel.h"
#include "engines/cuda/nvrtc.h"
#include "tests.h"

namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();

std::mt19937_64 random_bits(7);  // NOLINT: the test must be the same in each run

int draw(int least, int most) {
  return std::uniform_int_distribution<int>(least, most)(random_bits);
}

template <class Number>
Number any_of(const std::vector<Number>& choices) {
  return choices[static_cast<size_t>(draw(0, static_cast<int>(choices.size()) - 1))];
}

// Fills a row with random logits of one of several kinds.
void fill(float* logits, int32_t count) {
  const int kind = draw(0, 9);
  const float scale = any_of<float>({0.01f, 1, 10, 1000, 1e38f});
  std::normal_distribution<float> normal;
  for (int32_t i = 0; i < count; ++i) {
    const float number = normal(random_bits);
    logits[i] = kind == 0   ? 1.5f  // all equal
                : kind == 1 ? -std::fabs(std::round(number)) + (i % 2 == 0 ? 0.0f : -0.0f)  // ties
                : kind == 2 ? (number > 1 ? number : -kInfinite)
                            : number * scale;
    if (std::isinf(logits[i]) && kind != 2) logits[i] = std::numeric_limits<float>::max();
  }
  if (kind == 3) std::fill_n(logits, count, -kInfinite);
  const auto at = [&] { return logits + draw(0, count - 1); };
  if (kind == 4) *at() = any_of<float>({kInfinite, std::nanf("")});
  if (kind == 5) *at() = 80, *at() = 79.5f;
}

bool is_near(double one, double other, double relative) {
  if (std::isnan(one) || std::isnan(other)) return std::isnan(one) && std::isnan(other);
  return one == other || std::fabs(one - other) <= relative * std::max(1.0, std::fabs(other));
}

struct Tally {
  int passed = 0, failed = 0;
  void note(bool holds, const std::string& what) {
    ++(holds ? passed : failed);
    if (!holds) std::printf("failed: %s\n", what.c_str());
  }
};

// Compares a pass of the kernel with the host. The first half of the rows is drawn. Some of these
// rows are guided. The second half contains the unconditional logits for them.
void check_pass(Tally& tally, int32_t vocab_size) {
  const auto width = static_cast<size_t>(vocab_size);
  const size_t rows = vocab_size > 10000 ? 1 : 3;
  dlm::Denoiser denoiser{};
  denoiser.vocab_size = vocab_size;
  denoiser.mask_token_id = any_of<int32_t>({0, vocab_size / 2, vocab_size - 1, vocab_size});
  denoiser.top_k = draw(2, 5);
  if (vocab_size > 20 && draw(0, 2) == 0)
    denoiser.unused_tokens = {{3, 5}, {vocab_size - 7, vocab_size - 1}};
  const auto top_k = static_cast<size_t>(denoiser.top_k);
  std::vector<float> logits(2 * rows * width);
  for (size_t row = 0; row < 2 * rows; ++row) fill(&logits[row * width], vocab_size);

  std::vector<dlm::DrawRow> wanted(2 * rows);
  for (size_t row = 0; row < rows; ++row) {
    dlm::DrawRow& one = wanted[row];
    one.sampling = {any_of<double>({1e-300, 1e-6, 0.2, 1, 3, 1e30}),
                    any_of<double>({1, 1, 0.9, 0.3, 1e-9, 1 - 1e-9}),
                    any_of<int32_t>({0, 0, 1, 2, 5, vocab_size - 1, vocab_size + 3})};
    if (draw(0, 9) == 0) one.sampling.temperature = 0;  // nothing is drawn
    one.key = {random_bits(), static_cast<uint32_t>(draw(0, 99)), static_cast<uint32_t>(row)};
    one.told = any_of<dlm::Told>({dlm::Told::token, dlm::Told::distribution, dlm::Told::entropy});
    one.is_guided = draw(0, 2) == 0;
    one.guidance = any_of<double>({0.5, 2, 1e300});
    one.unconditional = static_cast<int32_t>(rows + row);
  }

  std::vector<float> device = logits;
  std::vector<int32_t> unused;
  for (const auto& [first, last] : denoiser.unused_tokens)
    unused.insert(unused.end(), {first, last});
  std::vector<dlm::Drawn> drawn(2 * rows);
  std::vector<int32_t> tokens(2 * rows * top_k, -1);
  std::vector<float> probs(tokens.size(), -1), log_odds(tokens.size(), -1), entropy(2 * rows, -1);
  const dlm::draw_kernel::Arguments arguments{
      device.data(),   wanted.data(),          unused.data(),
      drawn.data(),    tokens.data(),          probs.data(),
      log_odds.data(), entropy.data(),         static_cast<int32_t>(unused.size() / 2),
      vocab_size,      denoiser.mask_token_id, denoiser.top_k};
  static dlm::draw_kernel::Block block;
  for (size_t row = 0; row < 2 * rows; ++row)
    dlm::draw_kernel::Row(block, arguments, static_cast<int32_t>(row)).run();

  dlm::Pass pass{};
  pass.batch = 1, pass.rows = static_cast<int32_t>(2 * rows), pass.logits = logits.data();
  dlm::rule_out_unused(denoiser, pass);
  dlm::Sampler sampler;
  for (size_t row = 0; row < rows; ++row) {
    const dlm::DrawRow& one = wanted[row];
    const float* from = &logits[row * width];
    const std::string about =
        "V " + std::to_string(vocab_size) + ", T " + std::to_string(one.sampling.temperature) +
        ", top_p " + std::to_string(one.sampling.top_p) + ", top_k " +
        std::to_string(one.sampling.top_k) + (one.is_guided ? ", guided" : "") + ": ";
    dlm::Guided guided;
    if (one.is_guided) {
      dlm::Predictions with{};
      with.logits = from;
      const dlm::Predictions found =
          guided.guide(denoiser, one.guidance, with, &logits[(rows + row) * width], 1);
      from = found.logits;
      const bool is_finite = std::isfinite(found.probs[0]);
      tally.note(is_near(probs[row * top_k], found.probs[0], 1e-6), about + "best probability");
      tally.note(!is_finite || is_near(entropy[row], found.entropy[0], 1e-6), about + "entropy");
      for (size_t i = 0; is_finite && i < top_k; ++i) {
        const size_t at = row * top_k + i;
        tally.note(tokens[at] == found.tokens[i] && is_near(probs[at], found.probs[i], 1e-6) &&
                       is_near(log_odds[at], found.log_odds[i], 1e-6),
                   about + "candidate " + std::to_string(i));
      }
    } else {
      tally.note(tokens[row * top_k] == -1 && entropy[row] == -1, about + "candidates are written");
    }
    if (one.sampling.temperature == 0) continue;
    const dlm::Draw host =
        sampler.draw(from, vocab_size, denoiser.mask_token_id, one.sampling, one.key, one.told);
    const auto& [draw, behind] = drawn[row];
    const bool is_finite = std::isfinite(host.prob);
    const float best =
        *std::max_element(from, from + vocab_size, [&](const float& a, const float& b) {
          const auto value = [&](const float& logit) {
            return &logit - from == denoiser.mask_token_id ? -kInfinite : logit;
          };
          return value(a) < value(b);
        });
    tally.note(draw.token == host.token, about + "token " + std::to_string(draw.token) + ", not " +
                                             std::to_string(host.token));
    tally.note(
        is_near(draw.prob, host.prob, 1e-12) || (is_finite && one.told == dlm::Told::token),
        about + "probability " + std::to_string(draw.prob) + ", not " + std::to_string(host.prob));
    if (!is_finite) continue;
    tally.note(behind == static_cast<double>(from[draw.token]) - static_cast<double>(best),
               about + "the difference of logits");
    tally.note(one.told == dlm::Told::token || is_near(draw.margin, host.margin, 1e-12),
               about + "margin");
    tally.note(one.told != dlm::Told::entropy || is_near(draw.entropy, host.entropy, 1e-12),
               about + "entropy of the draw");
  }
}

int compile(int count, char** capabilities) {
  for (int i = 0; i < count; ++i) {
    try {
      const std::string code = dlm::compile_draw_kernel(std::atoi(capabilities[i]));
      std::printf("%s %zu bytes\n", capabilities[i], code.size());
      if (code.compare(0, 4, "\177ELF") != 0) return 1;
    } catch (const dlm::Error& error) {
      std::printf("%s\n", error.what());
      return 1;
    }
  }
  return 0;
}

}  // namespace

int draw_test(int count, char** arguments) {
  if (count > 2 && std::strcmp(arguments[1], "compile") == 0)
    return compile(count - 2, arguments + 2);
  Tally tally;
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 300;
  for (int round = 0; round < rounds; ++round)
    check_pass(tally, any_of<int32_t>({2, 3, 5, 37, 513, 1001, 4099}));
  for (int round = 0; round < rounds / 50; ++round)
    for (const int32_t vocab_size : {151'937, 262'144}) check_pass(tally, vocab_size);
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}
