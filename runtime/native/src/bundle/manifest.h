// Opens a bundle: reads and checks manifest.json, and checks the sizes and hashes of the bundle's
// files.
//
// docs/reference/bundle.md and manifest.schema.json define the format. The folder is untrusted
// until it has been checked. File names must stay inside the folder. Sizes are checked before
// memory is allocated. Unknown keys are errors. The runtime checks only the members `loop` and
// `files` of the manifest completely.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bundle/file_check.h"
#include "decode/policy.h"
#include "engines/engine.h"
#include "text/tokenizer.h"

namespace dlm {

// A file, its expected SHA-256, and advice for the user if the hash is wrong.
struct FileHash {
  std::string path, sha256;
  const char* advice;
  Records records;
};

// The effort levels that a bundle may have. The level with the fewest passes comes first.
constexpr const char* kEfforts[] = {"instant", "low", "medium", "high"};

// Named policies, in the order of the manifest.
using Policies = std::vector<std::pair<std::string, dlm_policy>>;

// Returns the policy with this name, or NULL.
inline const dlm_policy* find_policy(const Policies& policies, const std::string& name) {
  for (const auto& [known, policy] : policies)
    if (known == name) return &policy;
  return nullptr;
}

struct Manifest {
  std::string text;  // content of manifest.json
  // The name of the engine to run. If the caller chose "auto", this is the engine for which the
  // bundle was built.
  std::string engine;
  Denoiser denoiser;
  GraphSpec graph;
  std::string graph_sha256;         // a hash that identifies the graph and its weights
  std::vector<EngineSpec> engines;  // engine files, in the order of the manifest
  bool is_for_gpus = false;   // true if the bundle was built for GPUs, even if it has no engine yet
  std::string device_advice;  // how to run the bundle on a GPU; empty if the bundle was not built
                              // for GPUs
  std::string default_preset;
  Policies presets;                // the strings in these policies are string literals
  Policies efforts;                // fitted effort levels, fewest passes first; may be empty
  std::string effort_preset;       // preset for which the effort levels were fitted
  std::string text_path;           // path of the compiled text file; empty if the bundle has none
  std::string text_refusal;        // reason why the bundle has no text file; otherwise empty
  std::string text_sha256;         // expected hash of the text file; empty: not checked
  std::vector<FileHash> unhashed;  // large files whose hashes must still be checked with check_hash
};

// Reads and checks the bundle in the folder `path`. `engine` is the engine from dlm_open_options.
//
// If check_hashes is false, only the sizes of files are checked, and not their hashes. A large file
// is not hashed if there is a record that its hash was right, and the file has not changed since
// then (bundle/file_check.h). But every file is hashed if $DLM_HASH_FILES is "always", or if
// `engine` is "none", because then the bundle is opened only to check it.
//
// Engine files, and the hashes in their entries, are checked only if a TensorRT engine may run.
// This function does not hash the files in `unhashed`. The caller must check their hashes before
// the first pass. Meanwhile, an engine may already map these files into memory.
//
// Throws an Error with status DLM_NOT_FOUND, DLM_BAD_BUNDLE, DLM_UNSUPPORTED or
// DLM_INVALID_ARGUMENT.
Manifest read_bundle(const std::string& path, bool check_hashes, const std::string& engine);

// Reads the compiled text file. Throws an Error with status DLM_UNSUPPORTED if the bundle contains
// no text file, and an Error with status DLM_BAD_BUNDLE if the file has changed since the bundle
// was opened.
std::shared_ptr<const Text> read_text(const Manifest& manifest);

// Throws an Error with status DLM_BAD_BUNDLE if the hash of the file is not the expected hash.
void check_hash(const FileHash& file);

// Checks a caller's description of a denoiser. Throws an Error with status DLM_INVALID_ARGUMENT.
Denoiser check_denoiser(const dlm_denoiser& denoiser);

}  // namespace dlm
