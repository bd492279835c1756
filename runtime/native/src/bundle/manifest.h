// Reads a bundle from disk: checks manifest.json, and the sizes and hashes of its files.
//
// docs/reference/bundle.md and manifest.schema.json define the format. The folder is untrusted
// until checked: names must stay inside it, sizes are limited before memory is allocated, and
// unknown keys are errors. Reads only `loop` and `files`.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bundle/verified_files.h"
#include "decode/policy.h"
#include "engines/engine.h"
#include "text/tokenizer.h"

namespace dlm {

// A file, its expected SHA-256, and what to do if they differ.
struct FileHash {
  std::string path, sha256;
  const char* advice;
  Records records;
};

// Effort levels of a bundle, fewest passes first.
constexpr const char* kEfforts[] = {"instant", "low", "medium", "high"};

// By name, in the manifest's order.
using Policies = std::vector<std::pair<std::string, dlm_policy>>;

// The policy of that name, or NULL.
inline const dlm_policy* find_policy(const Policies& policies, const std::string& name) {
  for (const auto& [known, policy] : policies)
    if (known == name) return &policy;
  return nullptr;
}

struct Manifest {
  std::string text;    // of manifest.json
  std::string engine;  // the one to run; for "auto": the one it was built for
  Denoiser denoiser;
  GraphSpec graph;
  std::vector<EngineSpec> engines;  // in the manifest's order
  bool is_for_gpus = false;         // built for GPUs, even if it has no engine yet
  std::string device_advice;        // how to run it on a GPU; empty if it is not for GPUs
  std::string default_preset;
  Policies presets;           // strings are static
  Policies efforts;           // fitted effort levels, fewest passes first; may be empty
  std::string effort_preset;  // the preset for which the levels were fitted
  std::string text_path;      // path of the compiled text file; empty if it is missing
  std::string text_refusal;   // the reason if it is missing
  std::string text_sha256;    // expected hash of the text file when it is read; empty: not checked
  std::vector<FileHash> unhashed;  // large files that check_hash must still check
};

// Reads and checks the bundle in folder `path`. check_hashes = false checks sizes only. Large files
// are not hashed again if they are unchanged since their hash was last right
// (bundle/verified_files.h), unless $DLM_HASH_FILES is "always" or `engine` is "none", which opens
// a bundle only to check it. `engine` is from dlm_open_options; engine files, and the hashes in
// their entries, are checked only if an engine may run. The files left in `unhashed` may be checked
// while an engine maps them, but before any pass. Throws Error(DLM_NOT_FOUND, DLM_BAD_BUNDLE,
// DLM_UNSUPPORTED, DLM_INVALID_ARGUMENT).
Manifest read_bundle(const std::string& path, bool check_hashes, const std::string& engine);

// Reads the compiled text file. Throws Error(DLM_UNSUPPORTED) if the bundle has no such file, and
// Error(DLM_BAD_BUNDLE) if the file has changed since the bundle was opened.
std::shared_ptr<const Text> read_text(const Manifest& manifest);

// Throws Error(DLM_BAD_BUNDLE) if the file has another hash.
void check_hash(const FileHash& file);

// Checks a caller's description of a denoiser. Throws Error(DLM_INVALID_ARGUMENT).
Denoiser check_denoiser(const dlm_denoiser& denoiser);

}  // namespace dlm
