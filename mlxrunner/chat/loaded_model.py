"""The model of a chat, which commands replace by another one in the middle of the conversation.

Two models at once may be too much for the memory, so the present one is freed first. An interrupt
or an error may leave the chat without a model; `complete` loads the one before again.
"""

from __future__ import annotations

from collections.abc import Callable
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NoReturn

from mlxrunner.errors import MlxrunnerError, ModelError, PromptError
from mlxrunner.loading import add_draft_model, plan_model
from mlxrunner.memory.reserve import must_fit
from mlxrunner.models.eyes import runs_only_seeing
from mlxrunner.models.seeing import why_blind
from mlxrunner.options import RunnerSettings
from mlxrunner.runner import Runner
from mlxrunner.terminal.progress import loading as loading_bar
from mlxrunner.terminal.signals import uninterrupted

if TYPE_CHECKING:
    from mlxrunner.chat.repl import Chat


class LoadedModel:
    """The model of a chat, and the ways to load it again or to load another one."""

    def __init__(self, chat: Chat, attempt: Callable[[Callable[[], None]], int]) -> None:
        """Begin with the runner of `chat`. `attempt` calls a function and prints its error."""
        self._chat, self._attempt = chat, attempt
        self._known_runner = chat.conversation.runner  # `after_load` is not called for it

    def open_eyes(self) -> None:
        """Load the model again if it was loaded without its eyes.

        Raise ModelError if it has none, and PromptError if several hosts share it.
        """
        if not self._chat.conversation.sees:
            if (why := why_blind(self._chat.model)) is not None:
                raise ModelError(why)
            self._chat.say(f"{self._chat.model} is loaded again, with its eyes")
            self.change(self._chat.model, pictures=True)
        if not self._chat.conversation.sees:
            raise PromptError("a model that several hosts share sees no pictures")

    def change(self, name: str, **changes: Any) -> None:
        """Load another model, or the same one with other options, and continue with it.

        If the request itself is wrong, raise while the present model is still loaded.
        """
        loading = self._chat.loading | changes
        if name != self._chat.model:
            loading.pop("pictures", None)  # until one is shown
        plan = vars(RunnerSettings.among(loading))
        found = plan_model(name, **plan)
        if loading.get("reserve", True):
            must_fit(found)
        # Two models at once may be too much, so the present one is freed first. After an interrupt
        # here, `complete` loads it again.
        self._known_runner = self._chat.conversation.runner = NoRunner()  # type: ignore[assignment]
        try:
            runner = self._load(name, loading)
        except Exception as error:
            clear_frames(error.__traceback__)  # they hold what was loaded so far
            self._attempt(self.complete)
            raise
        if name != self._chat.model:
            self.forget_tokens()
        self._chat.model, self._chat.loading, self._chat.conversation.runner = name, loading, runner
        self.complete()

    def complete(self) -> None:
        """Complete a change of models that an interrupt or an error has cut off.

        Afterwards a model is loaded, and `after_load` has been called for it.
        """
        runner = self._chat.conversation.runner
        if isinstance(runner, NoRunner) and runner.why is None:
            self._chat.say(
                f"{self._chat.model} is loaded again: it had been given up for the other model"
            )
            with uninterrupted():
                self._chat.conversation.runner = self._loaded_again()
        if self._chat.conversation.runner is not self._known_runner and not isinstance(
            self._chat.conversation.runner, NoRunner
        ):
            with uninterrupted():
                branches = [self._chat.conversation.branch, *self._chat.branches.others.values()]
                if any(branch.history.shows_pictures for branch in branches):
                    self.forget_tokens()  # ids of pictures are those of the model that is gone
                for act in self._chat.after_load:
                    act(self._chat)
                self._known_runner = self._chat.conversation.runner

    def forget_tokens(self) -> None:
        """Keep the conversation as texts, which the model that is loaded now tokenizes."""
        self._chat.conversation.history = self._chat.conversation.history.without_tokens()
        self._chat.branches.forget_tokens()

    def _loaded_again(self) -> Runner:
        try:
            return self._load(self._chat.model, self._chat.loading)
        except Exception as error:
            failed = NoRunner(" ".join(str(error).split()))
            self._chat.conversation.runner = failed  # type: ignore[assignment]
            raise

    def _load(self, model: str, loading: dict[str, Any]) -> Runner:
        """Load a model in the middle of a chat, with a bar if that takes long.

        If the draft model can't guess for it, say why, and go on without.
        """
        if self._chat.load_elsewhere is not None:
            return self._chat.load_elsewhere(model, loading)
        own, why = dict(loading), ""
        draft = own.pop("draft_model", None)
        draft = None if own.get("pictures") or runs_only_seeing(model) else draft
        with loading_bar(model) as show:
            runner = Runner.load(model, progress=show, **own)
            try:
                if draft is not None:
                    trusts = bool(own.get("trust_remote_code"))
                    add_draft_model(runner, draft, trust_remote_code=trusts, progress=show)
            except MlxrunnerError as error:
                why = str(error).partition("\n")[0]
        if why:
            self._chat.say(f"{draft} guesses nothing for {model}: {why}")
        return runner


class NoRunner:
    """Stands for a runner that was freed for another one. Using it raises ModelError."""

    def __init__(self, why: str | None = None) -> None:
        """Keep the error of loading the model again; None means that this was not tried yet."""
        self.why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise ModelError(
            f"no model is loaded{f' ({self.why})' if self.why else ''}: /model NAME loads one"
        )
