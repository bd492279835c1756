// Code that the tests of kernels share. Each test file compares one kind of kernel with plain
// loops. kernels_test.cc runs the tests of all files.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"

namespace kernels_test {

using Floats = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                kInfinity = std::numeric_limits<float>::infinity();

struct Tally {
  int passed = 0, failed = 0;
  bool all = false;   // with the argument `all`: test every number of rows and columns
  std::string about;  // description of the current test
  void note(bool holds, const char* file, int line, const char* what) {
    ++(holds ? passed : failed);
    if (!holds) std::printf("%s:%d: failed: %s (%s)\n", file, line, what, about.c_str());
  }
};
#define CHECK(condition) tally.note((condition), __FILE__, __LINE__, #condition)

// ---- Runners of tasks ----

class InOrder final : public dlm::Parallel {
  void run(size_t count, void (*task)(void*, size_t), void* user) override {
    for (size_t i = 0; i < count; ++i) task(user, i);
  }
};

class Reversed final : public dlm::Parallel {
  void run(size_t count, void (*task)(void*, size_t), void* user) override {
    for (size_t i = count; i-- > 0;) task(user, i);
  }
};

class Threaded final : public dlm::Parallel {
  void run(size_t count, void (*task)(void*, size_t), void* user) override {
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < count; i = next++) task(user, i);
    };
    std::thread others[] = {std::thread(work), std::thread(work), std::thread(work)};
    work();
    for (std::thread& other : others) other.join();
  }
};

// ---- Numbers ----

class Numbers {
 public:
  explicit Numbers(unsigned seed) : source_(seed) {}
  float normal() { return normal_(source_); }
  int64_t below(int64_t count) {
    return static_cast<int64_t>(source_() % static_cast<uint64_t>(count));
  }
  Floats normals(int64_t count) {
    Floats all(static_cast<size_t>(count));
    for (float& one : all) one = normal();
    return all;
  }

 private:
  std::mt19937_64 source_;
  std::normal_distribution<float> normal_;
};

inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Returns the largest difference between corresponding numbers, divided by `scale`. Two NaNs count
// as equal. If only one of two corresponding numbers is finite, the result is infinite.
inline double distance(const Floats& got, const std::vector<double>& expected, double scale) {
  double worst = got.size() == expected.size() ? 0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    if (std::isnan(got[i]) && std::isnan(expected[i])) continue;
    const double apart = std::abs(got[i] - expected[i]) / scale;
    worst = std::isnan(apart) ? std::numeric_limits<double>::infinity() : std::max(worst, apart);
  }
  return worst;
}

// Checks that run(parallel) returns the same std::vector<Floats> for any order of tasks.
template <class Run>
void check_order_of_tasks(Tally& tally, Run run) {
  InOrder in_order;
  Reversed reversed;
  Threaded threaded;
  const std::vector<Floats> expected = run(in_order);
  for (dlm::Parallel* const other :
       {static_cast<dlm::Parallel*>(&reversed), static_cast<dlm::Parallel*>(&threaded)}) {
    const std::vector<Floats> got = run(*other);
    CHECK(std::equal(got.begin(), got.end(), expected.begin(), expected.end(), same_bits));
  }
}

// ---- The tests, by file ----

void test_linear(Tally& tally, const dlm::Kernels& kernels);
void test_nvfp4_linear(Tally& tally, const dlm::Kernels& kernels);
void test_tied_head(Tally& tally, const dlm::Kernels& kernels);
void test_attention(Tally& tally, const dlm::Kernels& kernels);
void test_positions_outside_the_tables_are_seen(Tally& tally);
void test_segments_that_lie_are_seen(Tally& tally);
void test_add_norm(Tally& tally, const dlm::Kernels& kernels);
void test_candidates(Tally& tally, const dlm::Kernels& kernels);
void test_low_rank_updates(Tally& tally, const dlm::Kernels& kernels);
#ifdef __x86_64__
void test_amx(Tally& tally, const dlm::Kernels& any);
#endif

}  // namespace kernels_test
