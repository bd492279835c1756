// A bundle on disk: manifest.json read and checked, every file's size and hash compared, nothing executed.
//
// The format is README's section "The bundle" and manifest.schema.json. The folder is hostile until checked: names may not
// leave it, sizes are bounded before anything is allocated, and what this reader does not know is refused by name.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "loop.h"

namespace dlm {

struct Manifest {
  std::string text;  // of manifest.json
  Denoiser denoiser;
  GraphSpec graph;
  std::vector<EngineSpec> engines;  // in the manifest's order
  bool is_for_gpus = false;         // built for them, though it may hold no engine yet
  std::string default_preset;
  std::vector<std::pair<std::string, dlm_policy>> presets;  // strings are static
};

// Reads and checks the bundle in folder `path`; check_hashes = false compares sizes only.
// Throws Error(DLM_NOT_FOUND, DLM_BAD_BUNDLE, DLM_UNSUPPORTED).
// `engine` is dlm_open_options': engine files and what their entries rest on are compared only where one is to be run.
Manifest read_bundle(const std::string& path, bool check_hashes, const std::string& engine);

// Checks what a caller says of a denoiser; throws Error(DLM_INVALID_ARGUMENT).
Denoiser check_denoiser(const dlm_denoiser& denoiser);

}  // namespace dlm
