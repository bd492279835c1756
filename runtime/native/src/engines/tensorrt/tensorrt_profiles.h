// The decisions of the TensorRT engine that need no GPU: the engine, and a pass's profile and rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "engines/engine.h"

namespace dlm::trt {

// The device and library that an engine would run on.
struct Platform {
  int32_t sm;                    // 89 = 8.9
  std::string builder, version;  // of the loaded library: "tensorrt", "10.14.1.48"
};

// Why the engine cannot run there; "" if it can.
inline std::string why_not(const EngineSpec& engine, const Platform& platform) {
  if (std::find(engine.sm.begin(), engine.sm.end(), platform.sm) == engine.sm.end()) {
    std::string built;
    for (const int32_t sm : engine.sm) built += (built.empty() ? "" : ", ") + sm_text(sm);
    return "built for SM " + built + ", this device is SM " + sm_text(platform.sm);
  }
  if (engine.builder != platform.builder || engine.version != platform.version) {
    return "built by " + engine.builder + " " + engine.version + ", the library here is " +
           platform.builder + " " + platform.version;
  }
  return "";
}

inline bool holds(const Sizes& sizes, int32_t value) {
  return value >= sizes.smallest && value <= sizes.largest;
}

// The profile for a pass of T tokens over S cached ones: 0 (prefill), 1 (block), or -1 if neither
// fits. If both do, full passes use prefill, whose kernels are tuned for their length.
inline int32_t choose_profile(const EngineSpec& engine, int32_t tokens, int32_t cached) {
  const Profile* const profiles[] = {&engine.prefill, &engine.block};
  const int32_t preferred = cached == 0 ? 0 : 1;
  for (const int32_t index : {preferred, 1 - preferred})
    if (holds(profiles[index]->tokens, tokens) && holds(profiles[index]->cached, cached))
      return index;
  return -1;
}

// The rows that a pass scores if R are needed: the next multiple of 8, so that pass sizes repeat,
// but at most T and the profile's limit.
inline int32_t rows_bucket(int32_t rows, int32_t tokens, const Sizes& sizes) {
  const int32_t rounded = std::min({(rows + 7) / 8 * 8, std::max(rows, tokens), sizes.largest});
  return std::max(rounded, sizes.smallest);
}

// The sizes of the largest passes, combined.
struct Largest {
  int32_t tokens, cached, rows;
};

inline Largest largest(const EngineSpec& engine) {
  const auto most = [&](Sizes Profile::* size) {
    return std::max((engine.prefill.*size).largest, (engine.block.*size).largest);
  };
  return {most(&Profile::tokens), most(&Profile::cached), most(&Profile::rows)};
}

// "passes of 1..512 tokens that score up to 64 rows, and passes of ..."
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
