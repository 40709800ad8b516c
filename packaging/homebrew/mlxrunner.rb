# The release workflow fills in @REPOSITORY@, @VERSION@ and @SHA256@, audits the result and installs it.
class Mlxrunner < Formula
  include Language::Python::Virtualenv

  desc "Run language models from a terminal, and say what was reused"
  homepage "https://github.com/@REPOSITORY@"
  url "https://github.com/@REPOSITORY@/releases/download/v@VERSION@/mlxrunner-@VERSION@.tar.gz"
  sha256 "@SHA256@"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  def install
    # MLX comes as wheels only, so pip fetches the dependencies.
    virtualenv_create(libexec, "python3.13")
    system "python3.13", "-m", "pip", "--python=#{libexec}/bin/python", "install", buildpath
    bin.install_symlink libexec/"bin/mlxrunner"
    generate_completions_from_executable(bin/"mlxrunner", "completion")
  end

  test do
    assert_match "mlxrunner #{version}", shell_output("#{bin}/mlxrunner --version")
    assert_match "Ana", shell_output("#{bin}/mlxrunner generate -p 'My name is Ana. What is my name?'")
  end
end
