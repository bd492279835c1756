// Functions of the TensorRT engine that tests can call without a GPU. They decide whether an engine
// can run, which profile runs a pass, and for how many rows a pass predicts tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "engines/engine.h"

namespace dlm::trt {

// A device, and the TensorRT library that was loaded.
struct Platform {
  int32_t sm;  // compute capability; 89 means 8.9
  // Name and version of the library, for example "tensorrt" and "10.14.1.48".
  std::string builder, version;
  bool is_lean = false;  // the library is TensorRT's lean runtime
};

// Returns the reason why the engine cannot run on the platform. Returns "" if the engine can run.
inline std::string why_not(const EngineSpec& engine, const Platform& platform) {
  if (std::find(engine.sm.begin(), engine.sm.end(), platform.sm) == engine.sm.end()) {
    std::string built;
    for (const int32_t sm : engine.sm) built += (built.empty() ? "" : ", ") + sm_text(sm);
    return "built for SM " + built + ", this device is SM " + sm_text(platform.sm);
  }
  if (engine.builder != platform.builder || engine.version != platform.version) {
    const bool is_helped = engine.is_version_compatible && engine.builder == platform.builder;
    return "built by " + engine.builder + " " + engine.version + ", the library here is " +
           platform.builder + " " + platform.version +
           (is_helped ? " (to run it, set DLM_TENSORRT to a libnvinfer_lean of its version)" : "");
  }
  if (platform.is_lean && !engine.is_version_compatible)
    return "the library here is TensorRT's lean runtime (libnvinfer_lean), which only runs engines "
           "that were built with --version-compatible";
  return "";
}

inline bool holds(const Sizes& sizes, int32_t value) {
  return value >= sizes.smallest && value <= sizes.largest;
}

// Chooses the profile for a pass of `tokens` new tokens that reads `cached` cached tokens. Returns
// 0 (prefill), 1 (block), or -1 if neither profile accepts the pass. If both profiles accept the
// pass, chooses block for a pass with cached tokens. For a pass without cached tokens, chooses
// prefill, because its kernels are tuned for long passes.
inline int32_t choose_profile(const EngineSpec& engine, int32_t tokens, int32_t cached) {
  const Profile* const profiles[] = {&engine.prefill, &engine.block};
  const int32_t preferred = cached == 0 ? 0 : 1;
  for (const int32_t index : {preferred, 1 - preferred})
    if (holds(profiles[index]->tokens, tokens) && holds(profiles[index]->cached, cached))
      return index;
  return -1;
}

// Returns the number of rows that a pass scores if a request needs `rows` rows. Rounds up to a
// multiple of 8, but at most to `tokens`. So passes have fewer different sizes, and more of them
// can replay a CUDA graph. The result is in the range of the profile.
inline int32_t rows_bucket(int32_t rows, int32_t tokens, const Sizes& sizes) {
  const int32_t rounded = std::min({(rows + 7) / 8 * 8, std::max(rows, tokens), sizes.largest});
  return std::max(rounded, sizes.smallest);
}

// The largest number of tokens, of cached tokens and of rows that at least one of the two profiles
// accepts.
struct Largest {
  int32_t tokens, cached, rows;
};

inline Largest largest(const EngineSpec& engine) {
  const auto most = [&](Sizes Profile::* size) {
    return std::max((engine.prefill.*size).largest, (engine.block.*size).largest);
  };
  return {most(&Profile::tokens), most(&Profile::cached), most(&Profile::rows)};
}

// Returns a text such as "passes of 1..512 tokens that score up to 64 rows, and passes of ...".
inline std::string limits_text(const EngineSpec& engine) {
  const auto range = [](const Sizes& sizes) {
    return std::to_string(sizes.smallest) + ".." + std::to_string(sizes.largest);
  };
  const auto text = [&](const Profile& profile) {
    const std::string over =
        profile.cached.largest == 0 ? "" : " over " + range(profile.cached) + " cached ones";
    return "passes of " + range(profile.tokens) + " tokens" + over + " that score up to " +
           std::to_string(profile.rows.largest) + " rows";
  };
  return text(engine.prefill) + ", and " + text(engine.block);
}

}  // namespace dlm::trt
