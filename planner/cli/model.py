import typer
app = typer.Typer()
@app.command("list")
def list_() -> None:
    "x"
@app.command("show")
def show(ref: str) -> None:
    "x"
