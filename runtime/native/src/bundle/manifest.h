// A bundle on disk: reads and checks manifest.json, and compares sizes and hashes of its files.
//
// docs/reference/bundle.md and manifest.schema.json say what it is. The folder is hostile until
// checked: names may not leave it, sizes are bounded before anything is allocated, and what this
// reader does not know is refused by name. It reads `loop` and `files` alone.
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

// A file, what its SHA-256 must be, and what to do where it is not.
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
  std::string engine;  // that runs it: read_bundle's, or for "auto" the one that it was built for
  Denoiser denoiser;
  GraphSpec graph;
  std::vector<EngineSpec> engines;  // in the manifest's order
  bool is_for_gpus = false;         // built for them, though it may hold no engine yet
  std::string device_advice;        // what makes it run on a GPU; empty if it is not for GPUs
  std::string default_preset;
  Policies presets;           // strings are static
  Policies efforts;           // levels fitted on data, fewest passes first; empty where none were
  std::string effort_preset;  // for which they were fitted
  std::string text_path;      // of the compiled text file; empty: there is none,
  std::string text_refusal;   // and why
  std::string text_sha256;    // that the text file must have as it is read; empty: not checked
  std::vector<FileHash> unhashed;  // large files, still to be compared by check_hash
};

// Reads and checks the bundle in folder `path`; check_hashes = false compares sizes only.
// Large files are not hashed again if they have not changed since their hash was right
// (bundle/verified_files.h), unless $DLM_HASH_FILES is "always" or `engine` is "none": a bundle
// that makes no passes is opened to be checked. Throws Error(DLM_NOT_FOUND, DLM_BAD_BUNDLE,
// DLM_UNSUPPORTED, DLM_INVALID_ARGUMENT). `engine` is dlm_open_options': engine files and what
// their entries rest on are compared only where one is to be run. What it leaves in `unhashed` can
// be compared while an engine maps the same files: nothing may be computed before.
Manifest read_bundle(const std::string& path, bool check_hashes, const std::string& engine);

// Reads the compiled text file. Throws Error(DLM_UNSUPPORTED) if the bundle has no such file, and
// Error(DLM_BAD_BUNDLE) if the file changed after the bundle was opened.
std::shared_ptr<const Text> read_text(const Manifest& manifest);

// Throws Error(DLM_BAD_BUNDLE) for a file of another hash.
void check_hash(const FileHash& file);

// Checks what a caller says of a denoiser; throws Error(DLM_INVALID_ARGUMENT).
Denoiser check_denoiser(const dlm_denoiser& denoiser);

}  // namespace dlm
